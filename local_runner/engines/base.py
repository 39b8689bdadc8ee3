"""The seam between the decoding loop and whatever computes logits.

A `Target` is a language model with a cache of committed tokens; a `Drafter` proposes blocks from the target's features.
`loop.decode` drives both and speaks in Rounds, so an engine is a pair of objects that keep these two contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Schedule

Choose = Callable[[int, torch.Tensor], int]
"""Picks draft token k (from 0) from its logits [V]; the loop passes one when drafts are sampled or logits are
processed.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What to decode and how. `seed` inside `sampling` fixes every random choice of the request."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    schedule: Schedule | None = None
    """How many drafted tokens to verify; None decodes plainly, with no drafter."""
    draft_style: str = "greedy"
    """`greedy` drafts are point masses; `sampled` drafts are drawn from the head's distribution and rejection-
    sampled.
    """
    name: str = "0"


@dataclass(slots=True)
class Draft:
    """A drafted block: `tokens` [γ] and `confidence` [γ] (probabilities, empty without a confidence head)."""

    tokens: list[int]
    confidence: list[float] = field(default_factory=list)


class Target(Protocol):
    """A causal language model with a preallocated cache."""

    vocab_size: int
    context_length: int
    length: int
    """Tokens whose keys and values the cache holds."""
    device: torch.device
    """Where the logits are."""

    def reset(self) -> None:
        """Forget the cached tokens."""

    def forward(self, tokens: Sequence[int], last_only: bool = False) -> torch.Tensor:
        """Append `tokens` to the cache; return logits [len(tokens), V], or [1, V] of the last token."""

    def truncate(self, length: int) -> None:
        """Forget cached tokens from position `length` on, exactly."""


class Drafter(Protocol):
    """Proposes the tokens that may follow the anchor."""

    @property
    def block(self) -> int:
        """γ: how many tokens one block proposes."""

    def reset(self) -> None:
        """Forget the context."""

    def observe(self, count: int) -> None:
        """Take in the target's features of the first `count` tokens of its last forward; they are now committed."""

    def draft(self, anchor: int, position: int, choose: Choose | None = None) -> Draft:
        """Propose a block after the `anchor` at `position`; without `choose`, every token is the argmax."""
