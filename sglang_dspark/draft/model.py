"""A draft model in use: it observes committed features, drafts blocks after an anchor, crops what was taken back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
from torch import Tensor

from sglang_dspark.draft.backbone import Backbone
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.heads import Heads

SMALLEST_SPAN = 256
"""Rows of context that the compiled block attends to at least; it is compiled anew each time that number doubles."""

COMPILATIONS = 256
"""Compiled spans of all models of a process at most: far more than there are doublings."""


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
        weight = backbone.fc
        self._rows = context_length + block

        def rows(kv_heads: int, head_dim: int) -> Tensor:
            return torch.zeros(kv_heads, self._rows, head_dim, dtype=weight.dtype, device=weight.device)

        self._cache = [(rows(a.kv_heads, a.head_dim), rows(a.kv_heads, a.head_dim)) for a in config.attention]
        self._tokens = torch.full((block,), config.mask_token_id, device=weight.device)
        self._offsets = torch.arange(block, device=weight.device)
        self._forward: Callable[..., tuple[Tensor, Tensor]] = backbone
        self._greedy: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = heads
        self._compiled = False

    def compile(self) -> None:
        """Run blocks through torch.compile from now on: slow at the first block and at each doubling of the context.

        Shapes are made static by attending to a power of two of context rows behind a mask. Blocks whose tokens are
        chosen by the caller run the backbone compiled and the heads eagerly.
        """
        # The target's own product may need a layout that the compiler cannot read; it finds one for the plain tensor.
        self.backbone.project = None
        self._forward = torch.compile(self.backbone, dynamic=False, fullgraph=True)
        self._greedy = torch.compile(self.heads, dynamic=False, fullgraph=True)
        self._compiled = True

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
        count, width = features.shape
        if position != self.length or width != self.config.feature_size or position + count > self.context_length:
            raise ValueError(
                f"features [{count}, {width}] at {position} do not continue a draft context of {self.length} of at most"
                f" {self.context_length} rows of width {self.config.feature_size}"
            )
        rows = self.backbone.context(features.to(self.backbone.fc), position)
        end = position + count
        for (keys, values), (k, v) in zip(self._cache, rows, strict=True):
            keys[:, position:end] = k.transpose(0, 1)
            values[:, position:end] = v.transpose(0, 1)
        self.length = end

    def draft(self, anchor: int, position: int, choose: Callable[[int, Tensor], int] | None = None) -> DraftBlock:
        """Draft a block after the `anchor` at `position`, whose features are not known yet: `position` is `length`.

        `choose(k, logits [V])` picks token k; without it every token is the argmax, and on a device nothing is read
        back before the block is done. Raises ValueError for another position.
        """
        if position != self.length:
            raise ValueError(f"the anchor is at {position} but the draft context has {self.length} rows")
        with self._running():
            self._tokens[0] = anchor
            span = self._span(position + self.block)
            hidden, logits = self._forward(self._tokens, self._offsets + position, self._cache, span, self._compiled)
            if choose is None:
                tokens, logits, confidence = self._greedy(self._tokens[:1], hidden, logits)
            else:
                tokens, logits, confidence = self.heads(self._tokens[:1], hidden, logits, partial(_ask, choose))
        return DraftBlock(tokens.tolist(), [] if confidence is None else confidence.tolist(), logits, hidden)

    def _running(self) -> AbstractContextManager[object]:
        """Inference mode or, compiled, frozen weights: laid out for a CPU's matrix units, at their memory again."""
        if not self._compiled:
            return torch.inference_mode()
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(inductor_config.patch(freezing=self._tokens.device.type == "cpu"))
        # One compilation a span and model is meant; the default limit of a few a process would end in an error.
        stack.enter_context(dynamo_config.patch(recompile_limit=COMPILATIONS))
        return stack

    def _span(self, needed: int) -> int:
        """Rows of the cache to attend to: those needed or, compiled, the next power of two."""
        if not self._compiled:
            return needed
        return min(max(SMALLEST_SPAN, 1 << (needed - 1).bit_length()), self._rows)


def _ask(choose: Callable[[int, Tensor], int], k: int, logits: Tensor) -> Tensor:
    return torch.tensor([choose(k, logits[0])], device=logits.device)
