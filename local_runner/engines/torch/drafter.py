"""A draft model beside its target, as the decoding loop sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from local_runner.engines.base import Choose, Draft, Drafter
from local_runner.engines.torch.target import TorchTarget
from sglang_dspark.decoding.calibrate import Calibration
from sglang_dspark.draft.model import DraftModel


@dataclass(slots=True)
class HeadDrafter:
    """A `Drafter` that feeds a draft model with its target's features.

    `tokens` are those whose features its cache holds. `keep` of them outlive the next `reset`.
    """

    model: DraftModel
    target: TorchTarget
    calibration: Calibration | None = None
    tokens: list[int] = field(default_factory=list)
    keep: int = 0

    @property
    def block(self) -> int:
        """γ."""
        return self.model.block

    def reset(self) -> None:
        """Forget the context but its first `keep` tokens."""
        if self.keep:
            self.model.crop(self.keep)
        else:
            self.model.reset()
        del self.tokens[self.keep :]
        self.keep = 0

    def observe(self, count: int) -> None:
        """Commit the features of the first `count` tokens of the target's last forward, but of those it skipped."""
        self.commit(self.target.features(count))

    def commit(self, features: torch.Tensor) -> None:
        """Append `features` [n, m·d] of the next n tokens that the target holds to the context."""
        if len(features):
            self.model.observe(features, self.model.length)
            self.tokens += self.target.tokens[len(self.tokens) : len(self.tokens) + len(features)]

    def draft(self, anchor: int, position: int, choose: Choose | None = None) -> Draft:
        """Propose a block after the anchor."""
        block = self.model.draft(anchor, position, choose)
        confidence: list[float] = torch.tensor(block.confidence_logits, dtype=torch.float64).sigmoid().tolist()
        return Draft(block.tokens, confidence if self.calibration is None else self.calibration.apply(confidence))


class KeepingDrafter(Drafter, Protocol):
    """A `Drafter` that can keep the start of its context: `tokens` and `keep` are as in `HeadDrafter`."""

    tokens: list[int]
    keep: int
