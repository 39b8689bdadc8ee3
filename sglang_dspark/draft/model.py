"""A draft model in use: it observes committed features, drafts blocks after an anchor, crops what was taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sglang_dspark.draft.backbone import Backbone
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.heads import Heads, greedy


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """A drafted block: `tokens` (γ ids), `confidence_logits` (γ numbers before the sigmoid, or none), `logits` [γ, V]
    after the sequential head, each row given the tokens before it, and `hidden` [γ, d] after the final norm.
    """

    tokens: list[int]
    confidence_logits: list[float]
    logits: Tensor
    hidden: Tensor


class DraftModel:
    """Backbone, heads and a preallocated cache of context rows.

    The cache holds committed context rows only; a block's own keys and values are written behind them, where the next
    ones overwrite them, and are never counted.
    """

    def __init__(
        self, config: DraftConfig, backbone: Backbone, heads: Heads, block: int, context_length: int, notes: list[str]
    ) -> None:
        """`block` <= config.block rows are drafted; `context_length` is how many committed rows there is room for."""
        self.config, self.backbone, self.heads = config, backbone, heads
        self.block, self.context_length, self.notes = block, context_length, notes
        self.length = 0
        """How many context rows are committed."""
        like = backbone.embedding

        def rows(kv_heads: int, head_dim: int) -> Tensor:
            return like.new_zeros(kv_heads, context_length + block, head_dim)

        self._cache = [(rows(a.kv_heads, a.head_dim), rows(a.kv_heads, a.head_dim)) for a in config.attention]
        self._tokens = torch.full((block,), config.mask_token_id, device=like.device)
        self._offsets = torch.arange(block, device=like.device)

    def reset(self) -> None:
        """Forget all context."""
        self.length = 0

    def crop(self, length: int) -> None:
        """Forget the context rows from position `length` on, exactly. Raises ValueError when there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a draft context of {self.length} rows to {length}")
        self.length = length

    @torch.inference_mode()
    def observe(self, features: Tensor, position: int) -> None:
        """Commit context rows: features [n, m·d] of the tokens at position..position+n-1, in `target_layer_ids`' order.

        Raises ValueError when `position` is not the next row, the width is another, or the rows do not fit.
        """
        self._check_features(features, position)
        count = features.shape[0]
        rows = self.backbone.context(features.to(self.backbone.embedding), position)
        end = position + count
        for (keys, values), (k, v) in zip(self._cache, rows, strict=True):
            keys[:, position:end] = k.transpose(0, 1)
            values[:, position:end] = v.transpose(0, 1)
        self.length = end

    def _check_features(self, features: Tensor, position: int) -> None:
        count, width = features.shape
        if position != self.length or width != self.config.feature_size or position + count > self.context_length:
            raise ValueError(
                f"features [{count}, {width}] at {position} do not continue a draft context of {self.length} of at most"
                f" {self.context_length} rows of width {self.config.feature_size}"
            )

    @torch.inference_mode()
    def draft(self, anchor: int, position: int, choose: Callable[[int, Tensor], int] | None = None) -> DraftBlock:
        """Draft a block after the `anchor` at `position`, whose features are not known yet: `position` is `length`.

        `choose(k, logits [V])` picks token k; without it every token is the argmax, and on a device nothing is read
        back before the block is done. Raises ValueError for another position.
        """
        self._check_anchor(position)
        self._tokens[0] = anchor
        hidden, logits = self.backbone(self._tokens, self._offsets + position, self._cache, position + self.block)
        pick = greedy if choose is None else partial(_ask, choose)
        tokens, logits, confidence = self.heads(self._tokens[:1], hidden, logits, pick)
        return DraftBlock(tokens.tolist(), [] if confidence is None else confidence.tolist(), logits, hidden)

    def _check_anchor(self, position: int) -> None:
        if position != self.length:
            raise ValueError(f"the anchor is at {position} but the draft context has {self.length} rows")


def _ask(choose: Callable[[int, Tensor], int], k: int, logits: Tensor) -> Tensor:
    return torch.tensor([choose(k, logits[0])], device=logits.device)
