"""What an engine holds beside weights, caches and work spaces, part by part, on a CPU: libraries, copies, conversions.

The PyTorch engine maps a checkpoint. Where it is stored in another precision every tensor is converted, and both are
there until all is read; where not, the weights are the mapped file itself. Then layers are laid out for few rows:

| forward | laid out anew |
|---|---|
| transformers | nothing |
| lean, without packed products | query, key and value, and gate and up, side by side |
| lean, packed (bfloat16 on oneDNN) | all matrices, when they are first used, and lm_head |
| compiled | the same side by side, all as tiles, and lm_head; the draft's lm_head is rounded to int8 in float32 |

What was laid out is let go of, but the allocator keeps small blocks, and a mapped file stays resident as long as
anything in it is used. llama.cpp maps its files and uses them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from local_runner.footprint import BYTES, Footprint

MIB = 1 << 20
TORCH_LIBRARIES, LLAMA_LIBRARIES = 144 * MIB, 68 * MIB
"""What transformers, or llama.cpp with a tokenizer of transformers, brings in when it loads a model: measured."""
TOKEN_BYTES, LLAMA_TOKEN_BYTES = 960, 320
"""What a tokenizer, or llama.cpp's vocabulary, holds for each of its tokens: measured."""
KEPT_BLOCK = 32 * MIB
"""Smaller blocks that are freed stay with the allocator."""
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What headers call a precision."""
ROUNDING = 12
"""Bytes an element takes while a matrix is rounded to int8: three times in float32."""


@dataclass(frozen=True, slots=True)
class Held:
    """Named bytes that are there while decoding, and bytes beside the weights at the worst moment of loading."""

    decoding: tuple[tuple[str, int], ...]
    loading: int


@dataclass(frozen=True, slots=True)
class Forward:
    """How the PyTorch engine computes a target: its precision, and which rows of the table above it is."""

    dtype: str
    lean: bool
    packed: bool
    compiled: bool


def with_held(f: Footprint, held: Held) -> Footprint:
    """The footprint of a pair in an engine that holds that much more."""
    return replace(f, held=held.decoding, loading=held.loading)


def in_torch(f: Footprint, how: Forward, *, unpacked_first: bool = False) -> Held:
    """What the PyTorch engine holds on a CPU. With `unpacked_first` a GGUF file has yet to be unpacked to float32."""
    size = BYTES[how.dtype]
    layers = [p.elements for p in f.parts if p.kind == "layer"]
    matrices, head = round(sum(layers) * size), round(f.vocab * f.hidden * size)
    aside = round(sum(_side_by_side(f, n) for n in layers) * size)
    as_stored = all(p.dtype == STORED[how.dtype] for p in f.parts)
    stays = as_stored or f.inner * f.hidden * size < KEPT_BLOCK
    programs = (("libraries", TORCH_LIBRARIES), ("tokenizer", f.vocab * TOKEN_BYTES))
    copies: list[tuple[str, int]] = []
    laid_out = 0
    rounded = f.draft is not None and how.compiled
    if how.lean and (how.packed or how.compiled):
        copies = [("matrices laid out anew", matrices if stays else 0), ("lm_head laid out anew", head)]
        laid_out = matrices + head if how.compiled else 0
    if how.lean and (how.compiled or not how.packed):
        copies.append(("matrices side by side", aside if stays else 0))
        laid_out += aside if how.compiled else 0
    if rounded:
        copies.append(("the draft's lm_head in int8", f.vocab * f.hidden))
        laid_out += ROUNDING * f.vocab * f.hidden
    reading = 0 if as_stored else f.bytes
    if unpacked_first:
        reading = 2 * round(sum(p.elements for p in f.parts) * BYTES["float32"])
    return Held((*programs, *((n, b) for n, b in copies if b)), TORCH_LIBRARIES + max(reading, laid_out))


def in_llama(f: Footprint) -> Held:
    """What the llama.cpp engine holds on a CPU."""
    vocabularies = f.vocab * LLAMA_TOKEN_BYTES * (2 if f.draft else 1)
    programs = (("libraries", LLAMA_LIBRARIES), ("tokenizer", f.vocab * TOKEN_BYTES), ("vocabularies", vocabularies))
    return Held(programs, sum(b for _, b in programs))


def _side_by_side(f: Footprint, elements: int) -> int:
    """Of a layer's elements, those of query, key, value, gate and up: all but out and down. Query and out are alike."""
    width = next((c.width for c in f.caches if c.kind == "full"), 0)
    keys_and_values, rest = width * f.hidden, 3 * f.inner * f.hidden
    return 2 * f.inner * f.hidden + keys_and_values + (elements - rest - keys_and_values) // 2
