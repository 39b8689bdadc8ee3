"""A draft model on the kernel: what `DraftModel` computes, for drafts in Qwen3 form with a vanilla Markov head or
none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.draft.linear import Linear
from sglang_dspark.draft.model import DraftBlock, DraftModel
from sglang_dspark.draft.rope import rope_table
from sglang_dspark.native.decoder import Decoder, LayerWeights, Shape, pointer, tiles


class NativeDraft(DraftModel):
    """Takes over a loaded `DraftModel` for which `fits` holds."""

    def __init__(self, draft: DraftModel, progress: Callable[[str], None] = lambda message: None) -> None:
        config, backbone, heads = draft.config, draft.backbone, draft.heads
        self.config, self.heads, self.block, self.notes = config, heads, draft.block, draft.notes
        self.context_length, self.length = draft.context_length, 0
        a = config.attention[0]
        layers = [
            LayerWeights(
                qkv=torch.cat([plain(layer.query), plain(layer.key_value)]),
                out=plain(layer.out),
                gate_up=plain(layer.gate_up),
                down=plain(layer.down),
                before_attention=layer.before_attention.weight,
                before_mlp=layer.before_mlp.weight,
                q_norm=layer.qk_norm[0],
                k_norm=layer.qk_norm[-1],
            )
            for layer in backbone.layers
        ]
        self._decoder = Decoder(
            _shape(draft),
            layers,
            backbone.embedding,
            backbone.lm_head,
            backbone.norm.weight,
            rope_table(config, a, draft.context_length + draft.block),
            causal=False,
            small_head=True,  # a draft may be rounded where its target may not: what it proposes is verified
            progress=progress,
        )
        self._fuse, self._fuse_norm = (
            tiles(plain(backbone.fc).to(torch.bfloat16)),
            backbone.hidden_norm.weight.float().contiguous(),
        )
        self._tokens = torch.full((draft.block + 1,), config.mask_token_id)
        self._w1 = self._w2 = None
        if heads.markov is not None:
            self._w1 = heads.markov.w1.to(torch.bfloat16).contiguous()
            self._w2 = tiles(plain(heads.markov.w2).to(torch.bfloat16))

    @staticmethod
    def fits(draft: DraftModel) -> bool:
        """Whether the kernel computes this draft: plain attention in Qwen3 form, without biases, soft cap or a
        window.
        """
        config = draft.config
        return (
            config.backbone == "qwen3"
            and not config.attention_bias
            and config.activation == "silu"
            and config.softcap is None
            and config.markov_head_type in ("vanilla", "none")
            and config.markov_rank % 2 == 0
            and all(a == config.attention[0] and a.window is None and not a.k_eq_v for a in config.attention)
            and draft.backbone.embedding.device.type == "cpu"
            and draft.backbone.embedding.dtype is torch.bfloat16
            and _shape(draft).fits()
        )

    def observe(self, features: Tensor, position: int) -> None:
        """See `DraftModel.observe`; features in float32."""
        self._check_features(features, position)
        self._decoder.kernel.dspark_context(
            ctypes.byref(self._decoder.model),
            pointer(features.float().contiguous()),
            features.shape[0],
            features.shape[1],
            position,
            pointer(self._fuse),
            pointer(self._fuse_norm),
        )
        self.length = position + features.shape[0]

    def draft(self, anchor: int, position: int, choose: Callable[[int, Tensor], int] | None = None) -> DraftBlock:
        """See `DraftModel.draft`; logits and hidden states in float32."""
        self._check_anchor(position)
        n, tokens = self.block, self._tokens.clone()
        tokens[0] = anchor
        hidden = torch.empty(n, self.config.hidden_size)
        logits, _ = self._decoder.forward(tokens[:n], position, states=hidden)
        if choose is not None:
            for k in range(n):
                if self._w1 is not None and self._w2 is not None:
                    self._chain(tokens[k:], logits[k : k + 1], 1)
                tokens[k + 1] = choose(k, logits[k])
        elif self._w1 is not None:
            self._chain(tokens, logits, n)
        else:
            tokens[1:] = logits.argmax(-1)
        return DraftBlock(tokens[1:].tolist(), self._judge(hidden, tokens[:n]), logits, hidden)

    def _chain(self, tokens: Tensor, logits: Tensor, rows: int) -> None:
        """Add the sequential head's bias to `rows` of logits and write the argmax of each behind its predecessor."""
        assert self._w1 is not None and self._w2 is not None
        self._decoder.kernel.dspark_chain(
            ctypes.byref(self._decoder.model),
            pointer(self._w1),
            pointer(self._w2),
            self._w1.shape[1],
            rows,
            pointer(logits),
            pointer(tokens),
        )

    def _judge(self, hidden: Tensor, before: Tensor) -> list[float]:
        """Confidence logits of a block whose tokens follow those in `before`."""
        head = self.heads.confidence
        if head is None:
            return []
        features = hidden
        if self.heads.with_markov and self._w1 is not None:
            features = torch.cat([hidden, F.embedding(before, self._w1).float()], -1)
        judged: list[float] = F.linear(features, head.weight.float(), head.bias.float()).squeeze(-1).tolist()
        return judged


def plain(product: Linear) -> Tensor:
    """The matrix [out, in] of a product that was never used."""
    if product.weight is None:
        raise ValueError("the draft has drafted already, and its weights are laid out for that")
    return product.weight


def _shape(draft: DraftModel) -> Shape:
    config, a = draft.config, draft.config.attention[0]
    return Shape(
        hidden=config.hidden_size,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        inner=config.intermediate_size,
        vocab=config.vocab_size,
        capacity=draft.context_length + draft.block,
        eps=config.eps,
    )
