"""Counts over all rounds that a process saw: what is kept when nobody watches, and what the metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 10
"""Of confidences, equally wide."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass
class Tally:
    """By position [γ], of the rounds that `scheduled` it: those that `reached` it, having accepted all before it, and
    those that `accepted` it. By bin of confidence [BINS], of the tokens that were reached: how many, the sum of what
    was predicted, and how many were accepted.
    """

    block: int
    rounds: int = 0
    drafted: int = 0
    committed: int = 0
    scheduled: Ints = field(init=False)
    reached: Ints = field(init=False)
    accepted: Ints = field(init=False)
    counts: Ints = field(default_factory=lambda: np.zeros(BINS, np.int64))
    predicted: Floats = field(default_factory=lambda: np.zeros(BINS))
    survived: Ints = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def __post_init__(self) -> None:
        self.scheduled, self.reached, self.accepted = (np.zeros(self.block, np.int64) for _ in range(3))

    def add(self, scheduled: Ints, accepted: Ints, confidence: Floats | None) -> None:
        """Count one round of each of r requests: `scheduled` [r] and `accepted` [r] of the block's tokens, and what
        was modelled for each, given that those before it survived, `confidence` [r, γ].
        """
        positions = np.arange(self.block)
        planned = positions < scheduled[:, None]
        kept = positions < accepted[:, None]
        reached = planned & (positions <= accepted[:, None])
        self.rounds += len(scheduled)
        self.drafted += len(scheduled) * self.block
        self.committed += int(accepted.sum()) + len(scheduled)
        self.scheduled += planned.sum(0)
        self.reached += reached.sum(0)
        self.accepted += kept.sum(0)
        if confidence is not None:
            values = confidence[reached]
            bins = np.clip((values * BINS).astype(np.int64), 0, BINS - 1)
            self.counts += np.bincount(bins, minlength=BINS)
            self.predicted += np.bincount(bins, values, BINS)
            self.survived += np.bincount(bins, kept[reached], BINS).astype(np.int64)

    def to_dict(self) -> dict[str, Any]:
        """Totals, rates by position, and reliability by bin; rates of nothing are None."""
        scheduled, accepted = int(self.scheduled.sum()), int(self.accepted.sum())
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "scheduled": scheduled,
            "accepted": accepted,
            "committed": self.committed,
            "mean_accepted_length": self.committed / self.rounds if self.rounds else None,
            "draft_acceptance_rate": accepted / scheduled if scheduled else None,
            "survival": _shares(self.accepted, self.scheduled),
            "conditional": _shares(self.accepted, self.reached),
            "reliability": [
                {"from": i / BINS, "to": (i + 1) / BINS, "tokens": int(n), "predicted": float(p) / n, "accepted": a / n}
                for i, (n, p, a) in enumerate(
                    zip(self.counts.tolist(), self.predicted, self.survived.tolist(), strict=True)
                )
                if n
            ],
        }


def _shares(some: Ints, of: Ints) -> list[float | None]:
    return [a / b if b else None for a, b in zip(some.tolist(), of.tolist(), strict=True)]
