"""Penalties along a drafted block: each row's logits as they would be if the tokens before it had been decoded one by
one. What SGLang calls presence, frequency and repetition penalties, and its minimum of new tokens; in torch, for any
device, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Penalties:
    """What one request asks for, and `counts` [V]: how often each token was answered before the anchor.

    Tokens of the prompt do not count. `stops` [s] are the tokens that cannot be answered before `minimum` tokens were.
    """

    frequency: float
    presence: float
    repetition: float
    minimum: int
    stops: Tensor
    counts: Tensor

    @classmethod
    def of(
        cls,
        answered: Iterable[int],
        vocabulary: int,
        device: torch.device,
        *,
        frequency: float = 0.0,
        presence: float = 0.0,
        repetition: float = 1.0,
        minimum: int = 0,
        stops: Iterable[int] = (),
    ) -> Penalties:
        """Those of a request that has `answered` these tokens before its next anchor."""
        tokens = torch.tensor(list(answered), dtype=torch.long)
        counts = torch.bincount(tokens, minlength=vocabulary)[:vocabulary].float().to(device)
        barred = torch.tensor(sorted(stops), dtype=torch.long, device=device)
        return cls(frequency, presence, repetition, minimum, barred, counts)

    def adjust(self, logits: Tensor, block: Tensor) -> None:
        """Change the logits [n, V] of a block's rows in place; `block` [n] is the anchor and the drafts after it.

        Row k predicts what follows block[k], so the tokens of block[: k + 1] are counted besides those before. First
        frequency and presence are taken off, then the repetition penalty divides what is positive and multiplies what
        is negative.
        """
        rows = torch.arange(len(block), device=logits.device)
        along = torch.zeros_like(logits, dtype=torch.float32)
        along[rows, block.long()] = 1.0
        counts = self.counts + along.cumsum(0)
        seen = counts > 0
        penalised = logits - self.frequency * counts - self.presence * seen
        if self.repetition != 1.0:
            scaled = torch.where(penalised > 0, penalised / self.repetition, penalised * self.repetition)
            penalised = torch.where(seen, scaled, penalised)
        if self.minimum > 0 and self.stops.numel():
            early = self.counts.sum() + rows + 1 < self.minimum
            barred = penalised[:, self.stops]
            penalised[:, self.stops] = torch.where(early[:, None], -torch.inf, barred)
        logits.copy_(penalised)

    def commit(self, block: Tensor, count: Tensor) -> None:
        """Count the first `count` (a scalar) tokens of `block` [n], the anchor and its accepted drafts, as answered."""
        committed = torch.arange(len(block), device=block.device) < count
        self.counts.index_add_(0, block.long(), committed.to(self.counts.dtype))
