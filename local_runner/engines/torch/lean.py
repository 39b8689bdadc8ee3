"""A short forward for dense Llama- and Qwen3-shaped targets, for the few rows of a verification.

The same arithmetic as the transformers model, with products fused, weights in the layout that few rows read fastest,
and keys and values written once into a preallocated cache. Time is what a round consists of, and most of it is spent
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.draft.linear import Linear
from sglang_dspark.native.decoder import LayerWeights

FAMILIES = ("llama", "qwen3")


def is_lean(config: Any) -> bool:
    """Whether `LeanModel` computes what a model of this configuration does."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not getattr(config, "mlp_bias", False)
        and set(getattr(config, "layer_types", None) or ("full_attention",)) == {"full_attention"}
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and getattr(config, "quantization_config", None) is None
    )


def head_size(config: Any) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def layer_weights(layer: Any) -> LayerWeights:
    """The weights of a transformers decoder layer in Llama or Qwen3 form."""
    a, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        qkv=torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]),
        out=a.o_proj.weight,
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
        before_attention=layer.input_layernorm.weight,
        before_mlp=layer.post_attention_layernorm.weight,
        q_norm=a.q_norm.weight if hasattr(a, "q_norm") else None,
        k_norm=a.k_norm.weight if hasattr(a, "k_norm") else None,
    )


class LeanLayer(nn.Module):
    """One decoder layer over rows [n, d], with its keys and values [kv_heads, capacity, head_dim]."""

    def __init__(self, weights: LayerWeights, config: Any, capacity: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_size(config),
        )
        self.eps = config.rms_norm_eps
        self.qkv, self.out = Linear(weights.qkv), Linear(weights.out)
        self.gate_up, self.down = Linear(weights.gate_up), Linear(weights.down)
        self.before_attention, self.before_mlp = weights.before_attention, weights.before_mlp
        self.qk_norm: Tensor | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            self.qk_norm = torch.stack([weights.q_norm] * self.heads + [weights.k_norm] * self.kv_heads)
        rows = (self.kv_heads, capacity, self.head_dim)
        self.keys = self.before_mlp.new_empty(rows)
        self.values = self.before_mlp.new_empty(rows)

    def forward(self, x: Tensor, start: int, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Rows x [n, d] at positions start..start+n-1; `mask` [n·heads/kv_heads, start+n] is added to the scores."""
        n, heads, kv, size = x.shape[0], self.heads, self.kv_heads, self.head_dim
        end, group = start + n, self.heads // self.kv_heads
        rows = self.qkv(F.rms_norm(x, x.shape[1:], self.before_attention, self.eps)).view(n, -1, size)
        turned, v = rows[:, : heads + kv], rows[:, heads + kv :]
        if self.qk_norm is not None:
            turned = F.rms_norm(turned, (size,), None, self.eps) * self.qk_norm
        left, right = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-right, left], -1) * sin
        self.keys[:, start:end] = turned[:, heads:].transpose(0, 1)
        self.values[:, start:end] = v.transpose(0, 1)
        # Query heads that share a key head become rows of one head, so that no key is read twice.
        q = turned[:, :heads].reshape(n, kv, group, size).transpose(0, 1).reshape(1, kv, n * group, size)
        mixed = F.scaled_dot_product_attention(q, self.keys[None, :, :end], self.values[None, :, :end], attn_mask=mask)
        mixed = mixed.view(kv, n, group, size).transpose(0, 1).reshape(n, heads * size)
        x = x + self.out(mixed)
        gate, up = self.gate_up(F.rms_norm(x, x.shape[1:], self.before_mlp, self.eps)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class LeanModel(nn.Module):
    """Embedding, layers, norm and lm_head, taken over from a transformers causal LM for which `is_lean` holds."""

    def __init__(self, model: Any, capacity: int) -> None:
        super().__init__()
        config, inner = model.config, model.model
        self.embedding = inner.embed_tokens.weight.detach()
        self.head_weight = model.lm_head.weight.detach()
        self.norm, self.eps = inner.norm.weight.detach(), config.rms_norm_eps
        self.group = config.num_attention_heads // config.num_key_value_heads
        positions = torch.arange(capacity, device=self.embedding.device)[None]
        cos, sin = inner.rotary_emb(self.embedding[:1][None], positions)
        self.cos, self.sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        self.layers = []
        for index in range(len(inner.layers)):
            self.layers.append(LeanLayer(layer_weights(inner.layers[index]), config, capacity))
            inner.layers[index] = None  # its weights are laid out anew: one copy in memory is enough
        self.registered = nn.ModuleList(self.layers)
        self.head = Linear(self.head_weight)
        self._masks: dict[int, Tensor] = {}

    def forward(self, tokens: Tensor, start: int, taps: Sequence[int], last_only: bool) -> tuple[Tensor, Tensor | None]:
        """Logits [n or 1, V] after `tokens` [n] at start.., and the outputs of the layers `taps` [n, len(taps)·d].

        Tap k is the output of decoder layer k, and -1 the embedding's. Keys and values are written behind position
        `start`.
        """
        n = tokens.shape[0]
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[start : start + n], self.sin[start : start + n]
        mask = self._mask(start, n)
        outputs = {-1: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, start, cos, sin, mask)
            if index in taps:
                outputs[index] = x
        features = torch.cat([outputs[tap] for tap in taps], -1) if taps else None
        x = x[-1:] if last_only else x
        return self.head(F.rms_norm(x, x.shape[1:], self.norm, self.eps)), features

    def _mask(self, start: int, n: int) -> Tensor | None:
        """0 where a row may look and -inf after it [n·group, start+n]; a window on one matrix a row count."""
        if n == 1:
            return None
        capacity = self.cos.shape[0]
        if n not in self._masks:
            mask = self.embedding.new_zeros(n, capacity + n)
            mask[:, capacity:] = torch.full_like(mask[:, capacity:], -torch.inf).triu(1)
            self._masks[n] = mask.repeat_interleave(self.group, 0)
        return self._masks[n][:, capacity - start :]
