"""DSpark drafts with a Gemma 4 backbone, of SGLang's layers: `sglang_dspark.draft.backbone` says what they compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.activation import GeluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dspark import DSparkDraftMixin
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm


class Gemma4DraftAttention(nn.Module):
    """Queries and keys are normed and rotated, values normed without a weight, scores not scaled."""

    def __init__(self, config: Any, layer_id: int) -> None:
        super().__init__()
        shape, ranks = config.dspark_layers[layer_id], int(get_parallel().tp_size)
        heads, kv_heads, self.head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
        self.num_heads, self.num_kv_heads = heads // ranks, max(1, kv_heads // ranks)
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.eps, self.k_eq_v = float(config.rms_norm_eps), bool(shape["k_eq_v"])
        bias = bool(config.attention_bias)
        self.qkv_proj = QKVParallelLinear(config.hidden_size, self.head_dim, heads, kv_heads, bias=bias)
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, eps=self.eps), RMSNorm(self.head_dim, eps=self.eps)
        rope = shape["rope"]
        self.rotary_emb = get_rope(
            self.head_dim,
            rotary_dim=self.head_dim,
            max_position=config.max_position_embeddings,
            base=rope["theta"],
            rope_scaling={"rope_type": rope["type"], **rope["parameters"]},
            partial_rotary_factor=rope["parameters"].get("partial_rotary_factor", 1.0),
            is_neox_style=True,
        )
        self.attn = RadixAttention(
            self.num_heads,
            self.head_dim,
            1.0,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            # SGLang counts the rows before a row, this package the row too.
            sliding_window_size=-1 if shape["window"] is None else shape["window"] - 1,
            attn_type=AttentionType.ENCODER_ONLY,
        )

    def forward(self, positions: Tensor, hidden: Tensor, forward_batch: Any) -> Tensor:
        """Rows [n, d] -> [n, d]."""
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], -1)
        q = self.q_norm(q.reshape(-1, self.head_dim)).view_as(q)
        q, k = self.rotary_emb(positions, q, self.apply_k_norm(k))
        out: Tensor = self.o_proj(self.attn(q, k, self._normed_values(v), forward_batch))[0]
        return out

    def kv_proj_only(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, neither normed nor rotated, and values of context rows [n, d]: [n, kv_size] each."""
        rows = slice(self.q_size, self.q_size + 2 * self.kv_size)
        bias = self.qkv_proj.bias
        k, v = linear(hidden, self.qkv_proj.weight[rows], None if bias is None else bias[rows]).chunk(2, -1)
        return k, self._normed_values(v)

    def apply_k_norm(self, k: Tensor) -> Tensor:
        """Norm each head of keys [n, kv_size]."""
        normed: Tensor = self.k_norm(k.reshape(-1, self.head_dim))
        return normed.view_as(k)

    def apply_k_rope(self, positions: Tensor, k: Tensor) -> Tensor:
        """Rotate keys [n, kv_size]."""
        rotated: Tensor = self.rotary_emb(positions, k.new_empty(k.shape), k)[1]
        return rotated

    def _normed_values(self, v: Tensor) -> Tensor:
        return rms_norm(v.reshape(-1, self.head_dim), (self.head_dim,), None, self.eps).view_as(v)


class Gemma4DraftMlp(nn.Module):
    """Gate and up in one product, an activation of the gate, down."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(d, [inner] * 2, bias=False)
        self.down_proj = RowParallelLinear(inner, d, bias=False)
        self.activation = GeluAndMul(approximate="tanh" if config.hidden_act == "gelu_pytorch_tanh" else "none")

    def forward(self, x: Tensor) -> Tensor:
        """Rows [n, d] -> [n, d]."""
        down: Tensor = self.down_proj(self.activation(self.gate_up_proj(x)[0]))[0]
        return down


class Gemma4DraftLayer(nn.Module):
    """Norms before and after both halves, and a scale of the whole at the end."""

    def __init__(self, config: Any, layer_id: int, **_: Any) -> None:
        super().__init__()
        d, eps = config.hidden_size, float(config.rms_norm_eps)
        self.self_attn = Gemma4DraftAttention(config, layer_id)
        self.mlp = Gemma4DraftMlp(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d, eps=eps), RMSNorm(d, eps=eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(d, eps=eps), RMSNorm(d, eps=eps)
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, positions: Tensor, x: Tensor, forward_batch: Any, residual: None) -> tuple[Tensor, None]:
        """Rows [n, d] -> [n, d]. Nothing is left to be added later."""
        if not x.numel():
            return x, None
        x = x + self.post_attention_layernorm(self.self_attn(positions, self.input_layernorm(x), forward_batch))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar, None


class Gemma4DSparkModel(DSparkDraftMixin, DFlashDraftModel):  # type: ignore[misc]
    """The backbone above behind SGLang's own heads. The target's embedding scales by √d itself."""

    decoder_layer_cls = Gemma4DraftLayer
    supports_fused_context_kv = False

    def compute_base_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] before the sequential head, capped, and the confidence head's features [n, d]."""
        logits, features = super().compute_base_logits(hidden)
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits, features

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load, keys' projections as those of values too where they are one."""

        def doubled() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                yield name, tensor
                if ".self_attn.k_proj." in name and self.layers[_layer(name)].self_attn.k_eq_v:
                    yield name.replace(".k_proj.", ".v_proj."), tensor

        super().load_weights(doubled())

    def _fused_kv_write_bundle(self, pool: Any) -> None:
        return None

    def _stacked_ctx_kv_params(self) -> None:
        return None


def _layer(name: str) -> int:
    return int(name.partition("layers.")[2].partition(".")[0])


EntryClass = [Gemma4DSparkModel]
