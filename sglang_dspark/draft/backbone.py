"""The parallel backbone: one pass over the anchor and mask rows, in Qwen3 and Gemma 4 forms.

Context rows, h = RMSNorm(fc(features)), never pass through the layers: each layer only projects them to keys and
values, which stay in the cache. Queries come from the block alone, whose rows see all context rows and, both ways, each
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.draft.config import Attention, DraftConfig
from sglang_dspark.draft.linear import Linear
from sglang_dspark.draft.rope import rope_table, rotate

Take = Callable[[str], Tensor]
"""Hands over the tensor of a name, on the device and in the precision of the model."""

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Norm(nn.Module):
    """RMSNorm: x / sqrt(mean(x²) + eps) · weight."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer(nn.Module):
    """One decoder layer over rows [n, d]; `mask` [n, span] of booleans, or None to attend to the whole span."""

    qk_norm: Tensor
    scalar: Tensor | None

    def __init__(self, config: DraftConfig, attention: Attention, take: Take) -> None:
        super().__init__()
        self.shape, self.eps, bias = attention, config.eps, config.attention_bias
        self.activate = ACTIVATE[config.activation]
        self.gemma = config.backbone == "gemma4"
        self.scale = 1.0 if self.gemma else attention.head_dim**-0.5

        def product(names: str, biased: bool = False) -> Linear:
            weights = torch.cat([take(f"{n}_proj.weight") for n in names.split()])
            return Linear(weights, torch.cat([take(f"{n}_proj.bias") for n in names.split()]) if biased else None)

        self.query = product("self_attn.q", bias)
        self.key_value = product("self_attn.k" if attention.k_eq_v else "self_attn.k self_attn.v", bias)
        self.out = product("self_attn.o", bias)
        self.gate_up, self.down = product("mlp.gate mlp.up"), product("mlp.down")
        # One weight row a head, so that queries and keys are normalised together.
        q_norm, k_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
        self.register_buffer("qk_norm", torch.stack([q_norm] * attention.heads + [k_norm] * attention.kv_heads))
        self.register_buffer("scalar", take("layer_scalar") if self.gemma else None)

        def norm(name: str) -> Norm:
            return Norm(take(f"{name}.weight"), config.eps)

        self.before_attention = norm("input_layernorm")
        self.after_attention = norm("post_attention_layernorm") if self.gemma else nn.Identity()
        self.before_mlp = norm("pre_feedforward_layernorm" if self.gemma else "post_attention_layernorm")
        self.after_mlp = norm("post_feedforward_layernorm") if self.gemma else nn.Identity()

    def _turn(self, rows: Tensor, norm: Tensor, rope: Tensor) -> Tensor:
        """Normed and rotated heads [n, ·, head_dim]; `norm` has a row a head, `rope` is [2, n, head_dim]."""
        turned = F.rms_norm(rows, (self.shape.head_dim,), None, self.eps) * norm
        return rotate(turned, rope[0].unsqueeze(1), rope[1].unsqueeze(1))

    def _key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, neither normed nor rotated yet, and values: [n, kv_heads, head_dim] each."""
        kv, size = self.shape.kv_heads, self.shape.head_dim
        rows = self.key_value(x)
        rows = rows.view(x.shape[0], rows.shape[1] // size, size)
        # Where keys are values, the last heads are the keys themselves.
        values = rows[:, -kv:]
        return rows[:, :kv], F.rms_norm(values, (size,), None, self.eps) if self.gemma else values

    def context(self, h: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, head_dim] of context rows h [n, d], at positions of `rope` [2, n, head_dim]."""
        keys, values = self._key_value(h)
        return self._turn(keys, self.qk_norm[self.shape.heads :], rope), values

    def forward(
        self, x: Tensor, rope: Tensor, positions: Tensor, keys: Tensor, values: Tensor, span: int, mask: Tensor | None
    ) -> Tensor:
        """Block rows x [n, d] at `positions` [n]: their keys and values go there; cache rows 0..span-1 are attended."""
        n, heads, kv, size = x.shape[0], self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        h = self.before_attention(x)
        k, v = self._key_value(h)
        turned = self._turn(torch.cat([self.query(h).view(n, heads, size), k], 1), self.qk_norm, rope)
        keys.index_copy_(1, positions, turned[:, heads:].transpose(0, 1))
        values.index_copy_(1, positions, v.transpose(0, 1))
        # Query heads that share a key head become rows of one head: no key is repeated, and masks are per row anyway.
        q = (
            turned[:, :heads]
            .reshape(n, kv, heads // kv, size)
            .permute(1, 2, 0, 3)
            .reshape(1, kv, heads // kv * n, size)
        )
        allowed = None if mask is None else mask.repeat(heads // kv, 1)
        mixed = F.scaled_dot_product_attention(
            q, keys[None, :, :span], values[None, :, :span], attn_mask=allowed, scale=self.scale
        )
        mixed = mixed.view(kv, heads // kv, n, size).permute(2, 0, 1, 3).reshape(n, heads * size)
        x = x + self.after_attention(self.out(mixed))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        x = x + self.after_mlp(self.down(self.activate(gate) * up))
        return x if self.scalar is None else x * self.scalar


class Backbone(nn.Module):
    """Embedding, layers, final norm, lm_head. `embedding` and `lm_head` [V, d] are usually the target's own tensors."""

    embedding: Tensor
    lm_head: Tensor

    def __init__(
        self,
        config: DraftConfig,
        take: Take,
        embedding: Tensor,
        lm_head: Tensor,
        positions: int,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`positions` is how far position tables reach; `project` a quicker product with `lm_head`, if any."""
        super().__init__()
        self.project = project
        self.softcap = config.softcap
        self.register_buffer("embedding", embedding)
        self.register_buffer("lm_head", lm_head)
        self.fc = Linear(take("fc.weight"))
        # Gemma rounds √d to the model's precision before it multiplies.
        root = torch.tensor(math.sqrt(config.hidden_size), dtype=embedding.dtype).item()
        self.embedding_scale = root if config.backbone == "gemma4" else None
        self.hidden_norm = Norm(take("hidden_norm.weight"), config.eps)
        self.norm = Norm(take("norm.weight"), config.eps)
        # Layers of equal head size and rope share one table [2, positions, head_dim].
        kinds = {(a.head_dim, repr(a.rope)): a for a in config.attention}
        tables = {kind: rope_table(config, a, positions).to(embedding) for kind, a in kinds.items()}
        self.ropes = [tables[a.head_dim, repr(a.rope)] for a in config.attention]
        self.layers = [
            Layer(config, attention, partial(_take_of_layer, take, index))
            for index, attention in enumerate(config.attention)
        ]

    def context(self, features: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [n, kv_heads, head_dim] of each layer, for features [n, m·d] of positions from `start`."""
        h = self.hidden_norm(self.fc(features))
        end = start + features.shape[0]
        return [layer.context(h, rope[:, start:end]) for layer, rope in zip(self.layers, self.ropes, strict=True)]

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: Sequence[tuple[Tensor, Tensor]], span: int
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [γ, d] after the final norm and logits [γ, V] before the sequential head.

        `tokens` [γ] are the anchor and masks, `positions` [γ] where they stand, `cache` each layer's keys and values
        [kv_heads, rows, head_dim], of which the block attends to rows 0..span-1, its own being the last of them.
        """
        x = F.embedding(tokens, self.embedding)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        windows = {layer.shape.window for layer in self.layers}
        masks = {w: self._mask(positions, span, w) for w in windows}
        for layer, rope, (keys, values) in zip(self.layers, self.ropes, cache, strict=True):
            here = rope.index_select(1, positions)
            x = layer(x, here, positions, keys, values, span, masks[layer.shape.window])
        hidden = self.norm(x)
        logits = F.linear(hidden, self.lm_head) if self.project is None else self.project(hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return hidden, logits

    @staticmethod
    def _mask(positions: Tensor, span: int, window: int | None) -> Tensor | None:
        """Which of rows 0..span-1 each block row sees [γ, span], or None for all."""
        if window is None or span <= window:
            return None
        rows = torch.arange(span, device=positions.device)
        return (positions[:, None] - rows).abs() < window


def _take_of_layer(take: Take, index: int, name: str) -> Tensor:
    return take(f"layers.{index}.{name}")
