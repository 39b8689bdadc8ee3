"""What has to be placed, and what each piece of it costs a step and a round: bytes times how often they are read.

With A sequences decoded together, a plain step forwards A rows and a round A·(γ + 1):

| part | bytes that a step reads | bytes that a round reads |
|---|---|---|
| a target's layer, and its cache | all, once | all, once: rows share the weights |
| its experts, k of E used a row | 1 − (1 − k/E)^rows of them | the same, with more rows |
| lm_head, or an embedding that is one too | all | all, and again where the draft multiplies with it |
| an embedding, W1 | a row of V for each row | the same; W1 γ rows a sequence |
| the draft's backbone and cache | nothing | all, once |
| W2 | nothing | all, γ times: the chain is sequential |

Work spaces are in the fastest pool that is used. They are written, and what they cost is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from local_runner.footprint import Cache, Footprint, Part

Goal = Literal["latency", "throughput"]
Precision = Literal["bfloat16", "float16", "float32"]
CacheType = Literal["bfloat16", "float16", "float32", "int8"]

PREFILL_ROWS = 256
"""Rows of a prompt that a forward takes at once."""
RUNTIME = {"cpu": 350 << 20, "cuda": 600 << 20, "mps": 300 << 20}
"""Bytes that the program and its libraries take before any model is loaded; estimates."""
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked of a plan: `context` tokens of room for each of `users` sequences.

    `latency` plans for one sequence decoded at a time, `throughput` for all of them together. `dtype` is what the
    target's weights are unpacked to (None: as stored), `head_dtype` the draft's. `mapped` files are not read but
    mapped.
    """

    context: int = 8192
    users: int = 1
    goal: Goal = "latency"
    dtype: Precision | None = None
    cache_dtype: CacheType = "bfloat16"
    head_dtype: Precision | Literal["int8"] | None = None
    mapped: bool = False

    @property
    def active(self) -> int:
        """Sequences that are decoded together."""
        return 1 if self.goal == "latency" else self.users


@dataclass(frozen=True, slots=True)
class Piece:
    """A named share of an item."""

    name: str
    kind: str
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """Pieces that are placed together, such as a layer and its cache; `plain` and `round` are bytes read."""

    pieces: tuple[Piece, ...]
    plain: float
    round: float

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(piece.bytes for piece in self.pieces)

    @property
    def name(self) -> str:
        """That of its first piece."""
        return self.pieces[0].name


def items(f: Footprint, w: Wishes) -> list[Item]:
    """All that can be placed freely, the target's first."""
    return [*_target(f, w), *_draft(f, w)]


def work_spaces(f: Footprint, w: Wishes, device: str) -> list[Piece]:
    """What has to be in the pool that computes, on a device such as cpu or cuda:0."""
    block, taps = (f.draft.block, f.draft.taps) if f.draft else (0, 0)
    rows = max(PREFILL_ROWS, w.active * (block + 1))
    sizes = {
        "tapped features": rows * taps * f.hidden * 2,
        # Logits, and probabilities made of them.
        "logits": w.active * (block + 1 + block) * f.vocab * LOGIT_BYTES * 2,
        "activations": rows * (6 * f.hidden + 3 * f.inner) * LOGIT_BYTES,
    }
    if f.held is None:
        sizes["program and libraries"] = RUNTIME.get(device.split(":")[0], RUNTIME["cuda"])
    sizes |= dict(f.held or ())
    return [Piece(name, "work space", "", size) for name, size in sizes.items() if size]


def touched(experts: int, active: int, rows: int) -> float:
    """The expected share of experts that `rows` rows use, `active` of `experts` each, were they chosen
    independently."""
    return 1 - (1 - active / experts) ** rows if experts else 1.0


def _target(f: Footprint, w: Wishes) -> Iterator[Item]:
    rollback = f.draft.block + 1 if f.draft else 1
    after = w.active * rollback if f.draft else w.active
    for part in f.parts:
        piece = _piece(part, w.dtype)
        size = piece.bytes
        if part.kind == "layer":
            mine = [c for c in f.caches if c.layer == part.layer]
            cache = Piece(f"cache {part.layer}", "cache", w.cache_dtype, _cache_size(mine, rollback, w))
            read = size + _cache_read(mine, w)
            yield Item((piece, cache) if cache.bytes else (piece,), read, read)
        elif part.kind == "experts":
            plain, more = (touched(f.experts, f.active, rows) for rows in (w.active, after))
            yield Item((piece,), size * plain, size * more)
        elif part.kind == "lm_head" or (part.kind == "embedding" and f.tied):
            again = 1 if f.draft and f.draft.shares_lm_head else 0
            yield Item((piece,), size, size * (1 + again))
        elif part.kind == "embedding":
            looked_up = f.draft.block * w.active if f.draft else 0
            yield Item((piece,), size / f.vocab * w.active, size / f.vocab * (after + looked_up))
        elif part.kind == "unused":
            yield Item((piece,), 0.0, 0.0)
        else:
            yield Item((piece,), size, size)


def _draft(f: Footprint, w: Wishes) -> Iterator[Item]:
    if f.draft is None:
        return
    gamma = f.draft.block
    rows = w.active * gamma
    for part in f.draft.parts:
        piece = _piece(part, w.head_dtype)
        size = piece.bytes
        if part.kind == "backbone":
            cache = Piece("draft cache", "cache", w.cache_dtype, _cache_size(f.draft.caches, gamma, w))
            pieces = (piece, cache) if cache.bytes else (piece,)
            yield Item(pieces, 0.0, size + _cache_read(f.draft.caches, w))
        elif part.kind == "draft experts":
            yield Item((piece,), 0.0, size * touched(f.experts, f.active, rows))
        elif part.kind in ("W1", "draft embedding"):
            yield Item((piece,), 0.0, size / f.vocab * rows)
        elif part.kind == "W2":
            yield Item((piece,), 0.0, size * gamma)
        else:
            yield Item((piece,), 0.0, size)


def _piece(part: Part, dtype: str | None) -> Piece:
    return Piece(part.name, part.kind, dtype or part.dtype, part.size(dtype))


def _cache_size(caches: Sequence[Cache], rollback: int, w: Wishes) -> int:
    return w.users * sum(c.size(w.context, rollback, w.cache_dtype) for c in caches)


def _cache_read(caches: Sequence[Cache], w: Wishes) -> int:
    """With full contexts: the slowest step of an answer."""
    return w.active * sum(c.read(w.context, w.cache_dtype) for c in caches)


def cache_bytes(found: Sequence[Item]) -> int:
    """What of the items is caches, which are not there yet while weights are loaded."""
    return sum(p.bytes for item in found for p in item.pieces if p.kind == "cache")


def spared_by_rings(f: Footprint, w: Wishes) -> int:
    """Bytes that layers with a window would not need, were rows outside it dropped."""
    rollback = f.draft.block + 1 if f.draft else 1
    return w.users * sum(
        c.size(w.context, rollback, w.cache_dtype) - c.size(w.context, rollback, w.cache_dtype, whole=False)
        for c in f.caches
    )
