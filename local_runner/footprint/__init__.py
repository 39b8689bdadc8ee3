"""What a pair takes in memory, counted from the headers of its files: never from parameters times bits.

A `Footprint` lists weights by part with the bytes that are stored, and caches by layer with what a token adds to them.
It is data, without PyTorch: `read` makes one from checkpoints, `shapes` from published shapes of models that are not
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PartKind = Literal["embedding", "lm_head", "layer", "experts", "rest", "unused", "backbone", "draft experts",
                   "draft embedding", "draft lm_head", "W1", "W2", "confidence"]  # fmt: skip
CacheKind = Literal["full", "sliding", "latent", "compressed", "recurrent"]

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0 + 2 / 32}
"""Bytes of an element; int8 has a 16-bit scale for each 32 elements."""
STATE_BYTES = 4
"""Recurrent states are kept in float32."""


@dataclass(frozen=True, slots=True)
class Part:
    """Weights that are placed together. `bytes` as stored, `dtype` the stored types in words, `layer` of the target."""

    name: str
    kind: PartKind
    elements: int
    bytes: int
    dtype: str
    layer: int | None = None

    def size(self, dtype: str | None) -> int:
        """Bytes as stored, or unpacked to `dtype`."""
        return self.bytes if dtype is None else round(self.elements * BYTES[dtype])


@dataclass(frozen=True, slots=True)
class Cache:
    """What one layer remembers of one sequence.

    `width` elements for each `every` tokens, of which at most the last `window` are ever looked at; `state` elements
    that do not grow, of which a copy is needed for every row that may have to be taken back.
    """

    layer: int
    kind: CacheKind
    width: int = 0
    window: int | None = None
    every: int = 1
    state: int = 0

    def size(self, context: int, rollback: int, dtype: str, *, whole: bool = True) -> int:
        """Bytes for a sequence of `context` tokens and `rollback` rows (γ + 1) that are verified and taken back.

        With `whole` sliding layers keep all rows too, as both engines do: rows that a rejected draft pushed out of a
        ring would be lost.
        """
        rows = context if whole or self.window is None else min(context, self.window)
        return round(self.width * (-(-(rows + rollback) // self.every)) * BYTES[dtype]) + (
            self.state * STATE_BYTES * (1 + rollback)
        )

    def read(self, context: int, dtype: str) -> int:
        """Bytes that one forward reads after `context` tokens."""
        rows = context if self.window is None else min(context, self.window)
        return round(self.width * -(-rows // self.every) * BYTES[dtype]) + self.state * STATE_BYTES


@dataclass(frozen=True, slots=True)
class DraftPrint:
    """A draft's weights and caches. `block` is γ, `taps` how many of the target's layers it sees, `rank` that of W1.

    `shares_lm_head` says that it multiplies with the target's lm_head, having none of its own.
    """

    name: str
    parts: tuple[Part, ...]
    caches: tuple[Cache, ...]
    block: int
    taps: int
    rank: int
    shares_lm_head: bool

    @property
    def bytes(self) -> int:
        """Of all its weights, as stored."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Footprint:
    """A target and perhaps its draft. `experts` of a layer are there, `active` are used for a token (0 for dense).

    `largest_file` bounds what is held while a file is read and dropped; `whole` is what is held while all of it is
    mapped. `notes` say what is estimated. `family` is the model type, `trained` the longest context that it allows, 0
    if that is not known. `held` is what a certain engine holds beside all this, and `loading` what it holds beside the
    weights at the worst moment of loading (see `held.py`); None where no engine is meant.
    """

    name: str
    parts: tuple[Part, ...]
    caches: tuple[Cache, ...]
    vocab: int
    hidden: int
    inner: int
    layers: int
    experts: int
    active: int
    largest_file: int
    draft: DraftPrint | None = None
    notes: tuple[str, ...] = ()
    family: str = ""
    trained: int = 0
    held: tuple[tuple[str, int], ...] | None = None
    loading: int | None = None

    @property
    def tied(self) -> bool:
        """Whether the embedding is the lm_head too."""
        return not any(part.kind == "lm_head" for part in self.parts)

    @property
    def bytes(self) -> int:
        """Of all the target's weights, as stored."""
        return sum(part.bytes for part in self.parts)

    def transient(self, mapped: bool) -> int:
        """Bytes held beyond the weights while loading: the largest file when files are read and dropped one by one,
        everything again when they are mapped, which counts as resident where memory is unified; or what an engine says.
        """
        if self.loading is not None:
            return self.loading
        draft = self.draft.bytes if self.draft else 0
        return self.bytes + draft if mapped else self.largest_file

    def cache_row(self, dtype: str = "bfloat16") -> int:
        """Bytes that a token adds to the target's caches, of layers that keep every token."""
        return sum(round(c.width * BYTES[dtype] / c.every) for c in self.caches if c.window is None)
