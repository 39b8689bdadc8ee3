"""Weights and caches laid out for kernel.cpp, and calls of it that take and give tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.native.build import load_kernel

TILE, LARGEST_HEAD = 16, 512
_POINTER = ctypes.c_void_p
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab", "capacity", "threads", "causal")
_MATRICES = ("qkv", "out", "gate_up", "down")
_NORMS = ("before_attention", "before_mlp", "q_norm", "k_norm")
_LAYER_POINTERS = (*_MATRICES, *_NORMS, "keys", "values")


class _Layer(ctypes.Structure):
    """`Layer` of kernel.cpp."""

    _fields_ = [
        (name, _POINTER)
        for name in [
            "qkv",
            "out",
            "gate_up",
            "down",
            "before_attention",
            "before_mlp",
            "q_norm",
            "k_norm",
            "keys",
            "values",
        ]
    ]


class _Model(ctypes.Structure):
    """`Model` of kernel.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in [
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "inner",
                "vocab",
                "capacity",
                "threads",
                "causal",
            ]
        ),
        ("eps", ctypes.c_float),
        ("layer", ctypes.POINTER(_Layer)),
        *((name, _POINTER) for name in ["embedding", "cosine", "sine", "norm", "head", "small_head", "head_scale"]),
    ]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder. `capacity` is how many positions its caches hold."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    capacity: int
    eps: float

    def fits(self) -> bool:
        """Whether the kernel's tiles divide these sizes."""
        sizes = (self.hidden, self.head_dim, self.inner, self.vocab)
        tiled = all(size % TILE == 0 for size in sizes)
        return tiled and self.heads % self.kv_heads == 0 and self.head_dim <= LARGEST_HEAD


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's matrices [out, in] and norms; query and key norms only where the model has them."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    before_attention: Tensor
    before_mlp: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


def tiles(weight: Tensor) -> Tensor:
    """[out, in] -> [out/16, in/2, 16, 2]: 16 outputs side by side, inputs in pairs."""
    rows, columns = weight.shape
    return weight.view(rows // TILE, TILE, columns // 2, 2).transpose(1, 2).contiguous()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] as int8 [out, in] and scales [out] in float32: each output by its greatest magnitude over 127."""
    wide = weight.float()
    scale = wide.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (wide / scale[:, None]).round().to(torch.int8), scale


class Decoder:
    """A stack of layers on the kernel, with its caches.

    `rope` [2, capacity, head_dim] holds cosines and signed sines, as `rope_table` makes them. A causal decoder's row
    sees what is before it; in one that is not, as in a drafted block, each row sees all rows. With a `small_head`,
    lm_head is rounded to int8: half the bytes.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[LayerWeights],
        embedding: Tensor,
        head: Tensor,
        norm: Tensor,
        rope: Tensor,
        *,
        causal: bool,
        small_head: bool = False,
        progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.shape, self.kernel = shape, load_kernel(progress)
        # A helping thread that comes late to a pass still looks at the layers before it finds that all is done.
        weakref.finalize(self, self.kernel.dspark_settle)
        self._alive: list[Tensor] = []
        rows = -(-shape.capacity // TILE) * TILE
        cache = shape.kv_heads * rows * shape.head_dim
        structs = (_Layer * len(layers))()
        for struct, w in zip(structs, layers, strict=True):
            for name in _MATRICES:
                setattr(struct, name, self._keep(tiles(getattr(w, name).to(torch.bfloat16))))
            for name in _NORMS:
                values = getattr(w, name)
                setattr(struct, name, None if values is None else self._keep(values.float()))
            # Zeros, because what was never written is multiplied by zero, which a NaN would survive.
            struct.keys = self._keep(torch.zeros(cache, dtype=torch.bfloat16))
            struct.values = self._keep(torch.zeros(cache, dtype=torch.bfloat16))
        cosine, sine = rope.float()
        quantised = quantise(head) if small_head else None
        self.model = _Model(
            len(layers),
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.inner,
            shape.vocab,
            rows,
            torch.get_num_threads(),
            int(causal),
            shape.eps,
            structs,
            self._keep(embedding.to(torch.bfloat16)),
            self._keep(cosine),
            self._keep(sine),
            self._keep(norm.float()),
            None if quantised else self._keep(tiles(head.to(torch.bfloat16))),
            self._keep(tiles(quantised[0])) if quantised else None,
            self._keep(quantised[1]) if quantised else None,
        )

    def forward(
        self,
        tokens: Tensor,
        start: int,
        taps: Sequence[int] = (),
        last_only: bool = False,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits [n or 1, V] and tapped layer outputs [n, len(taps)·hidden], float32, after tokens [n] at `start`.

        The normed rows that lm_head sees are written to `states` [n, hidden] where it is given.
        """
        n = tokens.shape[0]
        logits = torch.empty(1 if last_only else n, self.shape.vocab)
        features = torch.empty(n, len(taps) * self.shape.hidden)
        self.kernel.dspark_forward(
            ctypes.byref(self.model),
            pointer(tokens),
            n,
            start,
            (ctypes.c_int32 * len(taps))(*taps),
            len(taps),
            pointer(features),
            pointer(states) if states is not None else None,
            pointer(logits),
            int(last_only),
        )
        return logits, features

    def _keep(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor that lives as long as this object."""
        self._alive.append(tensor.contiguous())
        return self._alive[-1].data_ptr()


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """The address of a contiguous tensor, for one call."""
    return _POINTER(tensor.data_ptr())
