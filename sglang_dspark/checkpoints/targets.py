"""What a draft has to fit: the target's sizes and tokenizer, from its configuration or GGUF header alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.gguf_file import Gguf, Long, parse_gguf
from sglang_dspark.checkpoints.jsons import read_object
from sglang_dspark.checkpoints.outputs import CONFIG
from sglang_dspark.checkpoints.places import Folder, Place
from sglang_dspark.errors import InputError

TOKENIZER = "tokenizer."
UNCOPIED = ("tokenizer.chat_template", "tokenizer.ggml.mask_token_id")
TABLES = {
    "embed_tokens.weight": (
        "model.embed_tokens.weight",
        "model.language_model.embed_tokens.weight",
        "token_embd.weight",
    ),
    "lm_head.weight": ("lm_head.weight", "output.weight"),
}
"""What targets call the tables that drafts share with them."""


@dataclass(frozen=True, slots=True)
class Target:
    """A target's sizes. `tokens` counts the tokenizer's own, where known; the vocabulary may be padded beyond them."""

    place: Place
    hidden_size: int
    vocab_size: int
    layers: int
    architectures: tuple[str, ...]
    tokens: int | None = None
    header: Gguf | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.place.name

    def tokenizer(self) -> list[bytes]:
        """The encoded fields of its tokenizer, if it is a GGUF file."""
        if self.header is None:
            return []
        source = self.place.source(self.place.files()[0])
        spans = [s for k, s in self.header.spans.items() if k.startswith(TOKENIZER) and k not in UNCOPIED]
        return [source.read(start, end - start) for start, end in spans]


def read_target(place: Place | Path) -> Target:
    """The target at `place`, a folder or a .gguf file. Raises InputError if its sizes cannot be read."""
    where = Folder(place) if isinstance(place, Path) else place
    files = where.files()
    if len(files) == 1 and files[0].endswith(".gguf"):
        return _from_gguf(where, parse_gguf(where.source(files[0])))
    if CONFIG not in files:
        raise InputError(f"The target {where.name} has no config.json; give a folder in transformers format or a GGUF.")
    raw = read_object(where.source(CONFIG))
    inner = raw.get("text_config")
    fields = Fields({**raw, **inner} if isinstance(inner, Mapping) else raw, where.name)
    listed = raw.get("architectures")
    return Target(
        where,
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        layers=fields.integer("num_hidden_layers"),
        architectures=tuple(a for a in listed if isinstance(a, str)) if isinstance(listed, list) else (),
        tokens=_tokens(where, files),
    )


def _tokens(place: Place, files: Any) -> int | None:
    """One more than the last added token's id: how many tokens the tokenizer itself has."""
    name = "tokenizer_config.json"
    added = read_object(place.source(name)).get("added_tokens_decoder") if name in files else None
    ids = [int(i) for i in added if i.isdecimal() and len(i) < 10] if isinstance(added, Mapping) else []
    return max(ids) + 1 if ids else None


def _from_gguf(place: Place, header: Gguf) -> Target:
    arch = header.fields.get("general.architecture")
    tokens = header.fields.get("tokenizer.ggml.tokens")
    count = tokens.count if isinstance(tokens, Long) else len(tokens) if isinstance(tokens, list) else None
    sizes = {name: header.fields.get(f"{arch}.{name}") for name in ("embedding_length", "block_count", "vocab_size")}
    extra = header.fields.get(f"{arch}.nextn_predict_layers", 0)
    fields = Fields({**sizes, "vocab_size": count or sizes["vocab_size"]}, place.name)
    return Target(
        place,
        hidden_size=fields.integer("embedding_length"),
        vocab_size=fields.integer("vocab_size"),
        layers=fields.integer("block_count") - (extra if type(extra) is int else 0),
        architectures=(str(arch),),
        header=header,
    )
