"""Footprints of checkpoints, from their configurations and headers alone, wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from local_runner.footprint import Cache, DraftPrint, Footprint
from local_runner.footprint.caches import caches, from_gguf
from local_runner.footprint.listing import Stored, of_draft, of_target, parts, stored
from sglang_dspark.checkpoints.drafts import Draft
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.jsons import read_object
from sglang_dspark.checkpoints.places import FileSource, Place
from sglang_dspark.checkpoints.targets import TABLES, read_target
from sglang_dspark.checkpoints.tensors import Readable, TensorInfo, list_tensors

TABLE_NAMES = tuple(TABLES)
UNPACKED = "Sizes are as stored in the GGUF file; the PyTorch engine unpacks them: --dtype bfloat16 or float32."
SAMPLED_ROWS = 64
"""Rows of a table that are compared with the target's, to tell a copy from a table of the draft's own."""


def read_footprint(target: Place, draft: Draft | None = None) -> Footprint:
    """The footprint of the checkpoint at `target`, and of a draft for it. Raises InputError as their readers do."""
    sizes = read_target(target)
    if sizes.header is not None:
        tensors: Mapping[str, Readable] = sizes.header.tensors
        raw = from_gguf(sizes.header.fields, sizes.layers)
    else:
        tensors, raw = list_tensors(target), read_object(target.source("config.json"))
    listing = {name: stored(t) for name, t in tensors.items() if not name.startswith("mtp.")}
    tables = {name: next((tensors[n] for n in names if n in tensors), None) for name, names in TABLES.items()}
    # A GGUF file is read tensor by tensor, safetensors file by file.
    largest = max((t.bytes for t in listing.values()), default=0) if sizes.header else _largest_file(tensors)
    return footprint(
        called(target.name),
        raw,
        listing,
        largest,
        draft=None if draft is None else draft_print(draft, sizes.layers, tables),
        notes=(UNPACKED,) if sizes.header is not None else (),
    )


def footprint(
    name: str,
    raw: Mapping[str, Any],
    listing: Mapping[str, Stored],
    largest_file: int,
    draft: DraftPrint | None = None,
    notes: tuple[str, ...] = (),
) -> Footprint:
    """From a configuration in transformers' names and a listing of tensors. Raises InputError for a faulty field."""
    inner = raw.get("text_config")
    fields = Fields({**raw, **inner} if isinstance(inner, Mapping) else raw, name)
    found = parts(listing, of_target)
    layers = fields.integer("num_hidden_layers")
    experts = next(
        (fields.integer(n) for n in ("num_experts", "n_routed_experts", "num_local_experts") if fields.get(n)), 0
    )
    active = next((fields.integer(n) for n in ("num_experts_per_tok", "top_k_experts") if fields.get(n)), experts)
    wide = fields.get("intermediate_size")
    dense = max(wide) if isinstance(wide, list) and wide else wide if isinstance(wide, int) else 0
    hidden = fields.integer("hidden_size")
    table = next((p for p in found if p.kind == "embedding"), None)
    return Footprint(
        name=name,
        parts=found,
        caches=caches(fields, layers),
        vocab=table.elements // hidden if table else fields.integer("vocab_size"),
        hidden=hidden,
        inner=max(dense, active * fields.integer("moe_intermediate_size", 0, least=0)),
        layers=layers,
        experts=experts,
        active=min(active, experts),
        largest_file=largest_file,
        draft=draft,
        notes=notes,
        family=str(fields.get("model_type") or ""),
        trained=fields.integer("max_position_embeddings", 0, least=0),
    )


def called(name: str) -> str:
    """What plans call a checkpoint: a path's last part, because the rest of it is nobody else's business."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


def draft_print(draft: Draft, layers: int, tables: Mapping[str, Readable | None]) -> DraftPrint:
    """The draft's part. `tables` are the target's embedding and lm_head; copies of them are dropped when loading, so
    they do not count. A copy is told by its size and, where both are on this disk, by some of its rows.
    """
    own = {n for n in TABLE_NAMES if n in draft.tensors and not _is_copy(draft.tensors[n], _table(tables, n))}
    kept = {n: stored(t) for n, t in draft.tensors.items() if n not in TABLE_NAMES or n in own}
    fields = draft.fields(layers)
    return DraftPrint(
        name=called(draft.name),
        parts=parts(kept, of_draft),
        caches=_draft_caches(draft, fields),
        block=fields.integer("block_size"),
        taps=len(fields.listed("target_layer_ids", int)),
        rank=fields.integer("markov_rank", 0, least=0),
        shares_lm_head="lm_head.weight" not in own and not (own and fields.flag("tie_word_embeddings", False)),
    )


def _draft_caches(draft: Draft, fields: Fields) -> tuple[Cache, ...]:
    if draft.format.prefix:  # a module of the target's own kind: each stage keeps a window of the target's rows
        stages = {name.split(".")[1] for name in draft.stored if name.count(".") > 1}
        return tuple(
            Cache(i, "sliding", fields.integer("head_dim"), fields.integer("sliding_window"))
            for i in range(len(stages))
        )
    if draft.format.foreign:
        return ()
    attention = draft.config(fields.integer("num_target_layers")).attention
    return tuple(
        Cache(i, "sliding" if a.window else "full", 2 * a.kv_heads * a.head_dim, a.window)
        for i, a in enumerate(attention)
    )


def _table(tables: Mapping[str, Readable | None], name: str) -> Readable | None:
    """The target's table of that name; a target without an lm_head multiplies with its embedding."""
    return tables.get(name) or tables.get(TABLE_NAMES[0])


def _is_copy(own: Readable, theirs: Readable | None) -> bool:
    if theirs is None or own.shape != theirs.shape:
        return False
    if not (_is_local(own) and _is_local(theirs)):
        return True
    rows = min(SAMPLED_ROWS, own.shape[0])
    a, b = (t.rows(0, rows).to(torch.float32) for t in (own, theirs))
    # Either may be rounded to the other's precision.
    return any(torch.equal(a.to(dtype), b.to(dtype)) for dtype in (torch.float32, own.dtype, theirs.dtype))


def _is_local(tensor: Readable) -> bool:
    return isinstance(tensor, TensorInfo) and isinstance(tensor.source, FileSource)


def _largest_file(tensors: Mapping[str, Readable]) -> int:
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        if isinstance(tensor, TensorInfo):
            sizes[tensor.source.file_name] = sizes.get(tensor.source.file_name, 0) + stored(tensor).bytes
    return max(sizes.values(), default=0)
