"""The draft: a llama.cpp context that takes in the target's features and computes a block with its Markov chain."""

from __future__ import annotations

import numpy as np

from local_runner.engines.base import Choose, Draft
from local_runner.engines.gguf.context import Context, Floats, Model
from local_runner.engines.gguf.target import LlamaTarget
from sglang_dspark.decoding.calibrate import Calibration

BATCH = 64
"""Rows of features that a forward takes in: its workspace has this many rows of logits."""


class LlamaDrafter:
    """A `Drafter` whose chain runs greedily inside the library, so that there is nothing to `choose`.

    `tokens` are those whose features its cache holds. `keep` of them outlive the next `reset`.
    """

    def __init__(self, model: Model, target: LlamaTarget, *, block: int, confident: bool, threads: int) -> None:
        """Borrows what the file leaves out from `target`, whose features it is given."""
        self.target, self._block, self._confident = target, block, confident
        self._mask = model.mask_token
        self.calibration: Calibration | None = None
        self.tokens: list[int] = []
        self.keep = 0
        self.width = len(target.taps) * target.hidden_size
        self.context = Context(
            model,
            length=target.context_length + block,
            batch=max(BATCH, block),
            outputs=max(BATCH, block),
            threads=threads,
            width=self.width,
            other=target.context,
            causal=False,
        )
        model.library.set_nextn(self.context.pointer, True, True)

    @property
    def block(self) -> int:
        """γ."""
        return self._block

    def reset(self) -> None:
        """Forget the context but its first `keep` tokens."""
        self.truncate(self.keep)
        self.keep = 0

    def truncate(self, length: int) -> None:
        """Forget the context from position `length` on."""
        self.context.cut(length)
        del self.tokens[length:]

    def observe(self, count: int) -> None:
        """Commit the features of the first `count` tokens of the target's last forward, but of those it skipped."""
        rows = self.target.rows(count)
        start = len(self.tokens)
        self.commit(rows, self.target.tokens[start : start + len(rows)])

    def commit(self, features: Floats, tokens: list[int]) -> None:
        """Append the `features` [n, m·d] of `tokens` to the context."""
        self.context.inject(features, len(self.tokens))
        self.tokens += tokens

    def draft(self, anchor: int, position: int, choose: Choose | None = None) -> Draft:
        """Propose a block after the anchor: every token is the argmax, whatever `choose` would have picked."""
        if position != len(self.tokens):
            raise ValueError(f"a block at {position} after {len(self.tokens)} tokens of context")
        rows = self._block
        self.context.decode([anchor, *[self._mask] * (rows - 1)], position, rows)
        tokens: list[int] = self.context.logits(rows).argmax(-1).tolist()
        confidence: list[float] = []
        if self._confident:
            library, hidden = self.context.library, self.context.model.hidden_size
            confidence = np.ctypeslib.as_array(library.get_nextn(self.context.pointer), (rows, hidden))[:, 0].tolist()
            if self.calibration is not None:
                confidence = self.calibration.apply(confidence)
        self.context.cut(position)
        return Draft(tokens, confidence)
