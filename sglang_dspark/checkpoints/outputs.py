"""What a format's writer plans before a byte is written: documents, weights as streams, and what would be lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sglang_dspark.checkpoints.tensors import DTYPES, Readable

CONFIG = "config.json"
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that the source holds and the result cannot; `name` is what allows it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """What a conversion is asked for besides its format.

    `types` are GGUF types for the Markov tables and for the other matrices, None to keep what is stored. The target
    gives its name, its architectures and the encoded fields of its tokenizer, where there are any.
    """

    types: Mapping[str, str | None] = field(default_factory=lambda: {"markov": None, "backbone": None})
    target_name: str | None = None
    target_architectures: Sequence[str] = ()
    tokenizer: Sequence[bytes] = ()
    tokenizer_size: int | None = None


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write, of `kind` as its container calls the type; `size` bytes that `data` gives in order."""

    name: str
    shape: tuple[int, ...]
    kind: str
    size: int
    data: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Output:
    """A planned checkpoint. `fields` are those of a GGUF file, and None for safetensors."""

    documents: Mapping[str, bytes]
    tensors: Sequence[OutTensor]
    losses: Sequence[Loss] = ()
    fields: Sequence[bytes] | None = None

    @property
    def size(self) -> int:
        """Bytes of weights."""
        return sum(tensor.size for tensor in self.tensors)


def raw(values: torch.Tensor) -> bytes:
    """The bytes of a tensor in one dimension."""
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def as_stored(name: str, tensor: Readable) -> OutTensor:
    """A tensor written in the type that reading it gives."""
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    return OutTensor(name, tensor.shape, NAMES[tensor.dtype], size, map(raw, tensor.chunks()))
