"""Tensors as a header lists them, sorted into parts by their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from local_runner.footprint import Part, PartKind
from sglang_dspark.checkpoints.tensors import DTYPES, Readable, TensorInfo

LAYER = re.compile(r"(?:model\.|language_model\.|text_model\.)*layers\.(\d+)\.|blk\.(\d+)\.|transformer\.h\.(\d+)\.")
EXPERTS = re.compile(r"(?<!shared_)experts\.|_exps\.|\.ffn\.experts\.")
ROUTED_NOT = ("shared_experts", "shared_expert", "_shexp")
OTHER_SENSES = re.compile(r"vision|visual|audio|image|multi_modal|^v\.|^mm\.|^a\.")
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: the name of its type, its elements and its bytes."""

    dtype: str
    elements: int
    bytes: int


Sort = Callable[[str], tuple[str, PartKind, int | None]]


def stored(tensor: Readable) -> Stored:
    """What a header says of a tensor."""
    if isinstance(tensor, TensorInfo) and (p := tensor.packing) is not None:
        return Stored(p.name, tensor.count, tensor.count // p.block * p.size)
    return Stored(NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.count, tensor.count * tensor.dtype.itemsize)


def of_target(name: str) -> tuple[str, PartKind, int | None]:
    """The part of a target that the tensor `name` belongs to, its kind and its layer."""
    if OTHER_SENSES.search(name):
        return "encoders of other senses", "unused", None
    if match := LAYER.match(name):
        layer = int(next(g for g in match.groups() if g is not None))
        if EXPERTS.search(name) and not any(word in name for word in ROUTED_NOT):
            return f"target experts {layer}", "experts", layer
        return f"target layer {layer}", "layer", layer
    if name.endswith(("embed_tokens.weight", "token_embd.weight", "wte.weight", "embed.weight")):
        return "target embedding", "embedding", None
    if name in ("lm_head.weight", "output.weight", "head.weight") or name.endswith(".lm_head.weight"):
        return "target lm_head", "lm_head", None
    return "target norms and the rest", "rest", None


def of_draft(name: str) -> tuple[str, PartKind, int | None]:
    """The part of a draft, by DeepSpec's names or those of a module inside its target's checkpoint."""
    if "markov_w1" in name:
        return "Markov W1", "W1", None
    if "markov_w2" in name:
        return "Markov W2", "W2", None
    if "confidence" in name or "conf_proj" in name:
        return "confidence head", "confidence", None
    if name.endswith("embed_tokens.weight"):
        return "draft embedding", "draft embedding", None
    if name.endswith("lm_head.weight"):
        return "draft lm_head", "draft lm_head", None
    if EXPERTS.search(name) and not any(word in name for word in ROUTED_NOT):
        return "draft experts", "draft experts", None
    return "draft backbone", "backbone", None


@dataclass(slots=True)
class _Sum:
    kind: PartKind
    layer: int | None
    elements: int = 0
    bytes: int = 0
    types: Counter[str] = field(default_factory=Counter)


def parts(listing: Mapping[str, Stored], sort: Sort) -> tuple[Part, ...]:
    """The parts of a listing, in a fixed order: layers by number, the rest by name."""
    sums: dict[str, _Sum] = {}
    for name, tensor in listing.items():
        part, kind, layer = sort(name)
        into = sums.setdefault(part, _Sum(kind, layer))
        into.elements += tensor.elements
        into.bytes += tensor.bytes
        into.types[tensor.dtype] += tensor.bytes
    ordered = sorted(sums.items(), key=lambda item: (item[1].layer is None, item[1].layer or 0, item[0]))
    return tuple(Part(name, s.kind, s.elements, s.bytes, _words(s.types), s.layer) for name, s in ordered)


def _words(types: Counter[str]) -> str:
    """The types that make up at least a hundredth of the bytes, the commonest first."""
    total = sum(types.values())
    return " + ".join(name for name, size in types.most_common() if size * 100 >= total) or "nothing"
