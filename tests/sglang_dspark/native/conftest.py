"""Random decoders for the kernel, and a plain float32 decoder that knows nothing of tiles or caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.native.build import find_compiler, load_kernel
from sglang_dspark.native.decoder import Decoder, LayerWeights, Shape

VOCAB, CAPACITY = 112, 61


@pytest.fixture(autouse=True, scope="session")
def threads() -> Iterator[None]:
    """One thread unless a test asks for more: a decoder takes as many as PyTorch has when it is made."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel() -> Any:
    """The compiled library."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    return load_kernel()


@dataclass
class Model:
    """Weights in bfloat16, as the kernel gets them."""

    shape: Shape
    layers: list[LayerWeights]
    embedding: Tensor
    head: Tensor
    norm: Tensor
    rope: Tensor

    def decoder(self, causal: bool = True, threads: int = 1, small_head: bool = False) -> Decoder:
        torch.set_num_threads(threads)
        try:
            return Decoder(
                self.shape,
                self.layers,
                self.embedding,
                self.head,
                self.norm,
                self.rope,
                causal=causal,
                small_head=small_head,
            )
        finally:
            torch.set_num_threads(1)

    def reference(
        self, tokens: Tensor, start_of_block: int | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Logits [n, V], the residual stream after the embedding and after each layer, and the normed rows.

        Causal, but for rows from `start_of_block` on, which see each other both ways; all arithmetic is in `dtype`.
        """
        s, n = self.shape, len(tokens)
        allowed = torch.ones(n, n).tril().bool()
        if start_of_block is not None:
            allowed[start_of_block:] = True
        cos, sin = (t[:n, None].to(dtype) for t in self.rope)
        x = F.embedding(tokens, self.embedding).to(dtype)
        stream = [x]
        for w in self.layers:
            rows = F.linear(norm(x, w.before_attention, s.eps), w.qkv.to(dtype)).view(n, -1, s.head_dim)
            q, k, v = rows.split([s.heads, s.kv_heads, s.kv_heads], 1)
            if w.q_norm is not None and w.k_norm is not None:
                q, k = norm(q, w.q_norm, s.eps), norm(k, w.k_norm, s.eps)
            q, k = (t * cos + t.roll(s.head_dim // 2, -1) * sin for t in (q, k))
            k, v = (t.repeat_interleave(s.heads // s.kv_heads, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * s.head_dim**-0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)
            x = x + F.linear(mixed.reshape(n, -1), w.out.to(dtype))
            gate, up = F.linear(norm(x, w.before_mlp, s.eps), w.gate_up.to(dtype)).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w.down.to(dtype))
            stream.append(x)
        states = norm(x, self.norm, s.eps)
        return F.linear(states, self.head.to(dtype)), stream, states


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


@pytest.fixture(scope="session")
def make(kernel: Any) -> Callable[..., Model]:
    """make(heads, kv_heads, head_dim, hidden, inner, qk_norm): a random decoder of two layers."""

    def build(
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        hidden: int = 48,
        inner: int = 80,
        qk_norm: bool = False,
        vocab: int = VOCAB,
    ) -> Model:
        numbers = torch.Generator().manual_seed(heads * head_dim + inner)

        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=numbers) * 1.5 * columns**-0.5).bfloat16()

        def scale(size: int) -> Tensor:
            return (1 + torch.randn(size, generator=numbers) * 0.2).bfloat16()

        layers = [
            LayerWeights(
                qkv=matrix((heads + 2 * kv_heads) * head_dim, hidden),
                out=matrix(hidden, heads * head_dim),
                gate_up=matrix(2 * inner, hidden),
                down=matrix(hidden, inner),
                before_attention=scale(hidden),
                before_mlp=scale(hidden),
                q_norm=scale(head_dim) if qk_norm else None,
                k_norm=scale(head_dim) if qk_norm else None,
            )
            for _ in range(2)
        ]
        angles = torch.arange(CAPACITY)[:, None] * 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        cos, sin = angles.cos(), angles.sin()
        rope = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
        shape = Shape(hidden, heads, kv_heads, head_dim, inner, vocab, CAPACITY, 1e-5)
        return Model(shape, layers, matrix(vocab, hidden) * hidden**0.5, matrix(vocab, hidden), scale(hidden), rope)

    return build


@pytest.fixture(scope="session")
def text() -> Tensor:
    """Tokens up to the last position of the cache."""
    return torch.randint(0, VOCAB, (CAPACITY,), generator=torch.Generator().manual_seed(5))
