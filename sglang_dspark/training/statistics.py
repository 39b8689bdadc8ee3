"""The statistics of a draft on a set of prompts, from the rounds that decoded them.

A prompt is all rounds of one conversation: prompts are independent of each other and rounds are not, so intervals are
taken by drawing prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_dspark.decoding.calibrate import reliability
from sglang_dspark.decoding.rounds import (
    Round,
    conditional_by_position,
    decode_rounds,
    summarise,
    survival_by_position,
)

Prompts = Sequence[Sequence[Round]]
Floats = NDArray[np.float64]
SAMPLES = 2000
"""How many times the bootstrap draws."""


def statistics(prompts: Prompts, block: int) -> dict[str, Any]:
    """What `evaluate` reports of `prompts` decoded with blocks of at most `block` tokens.

    Counts and rates are pooled over the rounds after prefill (see `rounds.summarise`). `survival` and `conditional` are
    by position, from 1. `confidence` is None for a draft without a confidence head; see `confidence_statistics`. Times
    are seconds.
    """
    rounds = [r for prompt in prompts for r in prompt]
    made = summarise(rounds)
    return {
        "prompts": len(prompts),
        "tokens": made.tokens,
        "rounds": made.rounds,
        "drafted": made.drafted,
        "scheduled": made.scheduled,
        "accepted": made.accepted,
        "mean_accepted_length": made.mean_accepted_length,
        "mean_accepted_length_95": interval([prompts]),
        "draft_acceptance_rate": made.draft_acceptance_rate,
        "survival": survival_by_position(rounds, block),
        "conditional": conditional_by_position(rounds, block),
        "confidence": confidence_statistics(rounds, block),
        "ttft_s": made.ttft_s,
        "seconds": made.seconds,
        "tokens_per_s": made.tokens_per_s or None,
    }


def confidence_statistics(rounds: Sequence[Round], block: int) -> dict[str, Any] | None:
    """How well confidences foretell acceptance (see `judged`), over all positions and at each from 1.

    `auc` is the chance that an accepted token had the greater confidence of the two, `ece` the expected calibration
    error, `judged` how many tokens each rests on; `reliability` is what a reliability diagram shows. None where nothing
    was judged.
    """
    positions = judged(rounds, block)
    confidence = np.concatenate([c for c, _ in positions]) if positions else np.empty(0)
    if not len(confidence):
        return None
    accepted = np.concatenate([a for _, a in positions])
    diagram = reliability(confidence, accepted)
    return {
        "auc": auc(confidence, accepted),
        "ece": diagram.ece,
        "auc_by_position": [auc(c, a) for c, a in positions],
        "ece_by_position": [reliability(c, a).ece for c, a in positions],
        "judged": [len(c) for c, _ in positions],
        "reliability": {"predicted": diagram.predicted, "observed": diagram.observed, "counts": diagram.counts},
    }


def judged(rounds: Sequence[Round], block: int) -> list[tuple[Floats, Floats]]:
    """For each position from 1: the confidences of the tokens that were verified there after all before them were
    accepted, and whether they were accepted too (1 or 0).
    """
    found: list[list[tuple[float, bool]]] = [[] for _ in range(block)]
    for r in decode_rounds(rounds):
        for k in range(min(r.accepted + 1, r.scheduled, len(r.confidence), block)):
            found[k].append((r.confidence[k], r.accepted > k))
    tables = [np.array(pairs, float).reshape(-1, 2) for pairs in found]
    return [(table[:, 0], table[:, 1]) for table in tables]


def auc(scores: ArrayLike, outcomes: ArrayLike) -> float | None:
    """The area under the ROC curve: the chance that a score of outcome 1 beats one of outcome 0, ties counting half.

    `scores` and `outcomes` are [n]. None unless both outcomes occur.
    """
    s, happened = np.asarray(scores, float), np.asarray(outcomes, bool)
    won, lost = s[happened], np.sort(s[~happened])
    if not len(won) or not len(lost):
        return None
    beaten = (np.searchsorted(lost, won, "left") + np.searchsorted(lost, won, "right")) / 2
    return float(beaten.mean() / len(lost))


def interval(tasks: Sequence[Prompts], samples: int = SAMPLES, seed: int = 0) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of the mean over `tasks` of τ, drawing each task's prompts with replacement.

    None if a task has fewer than two prompts that were decoded beyond their first token.
    """
    random = np.random.default_rng(seed)
    means = np.zeros(samples)
    for prompts in tasks:
        decoded = [after for prompt in prompts if (after := decode_rounds(prompt))]
        if len(decoded) < 2:
            return None
        # Of each prompt: the tokens that its rounds committed, bonus included, and the rounds.
        counts = np.array([(sum(r.accepted + 1 for r in after), len(after)) for after in decoded], float)
        drawn = counts[random.integers(len(counts), size=(samples, len(counts)))].sum(1)
        means += drawn[:, 0] / drawn[:, 1] / len(tasks)
    if not tasks:
        return None
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
