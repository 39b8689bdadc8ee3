"""The reference that sampling is held to: straight from the definitions, row by row in float64, with a full sort."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sglang_dspark.decoding.sampling import SamplingParams

Row = np.ndarray
Naive = Callable[[Row, SamplingParams, Sequence[int], Sequence[int]], tuple[Row, Row]]


def _naive(logits: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> tuple[Row, Row]:
    """Processed logits [V] and probabilities [V] of the token after `prompt` and `output`."""
    row = np.array(logits, dtype=np.float64)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in dict(params.logit_bias).items():
        row[token] += bias
    if params.greedy:
        return row, np.eye(len(row))[row.argmax()]

    probs: Row = np.exp((row - row.max()) / params.temperature)
    if params.top_k:
        probs[[sum(probs > p) >= params.top_k for p in probs]] = 0
    probs /= probs.sum()
    falling = np.sort(probs)[::-1]
    mass_before = np.concatenate([[0], np.cumsum(falling)])[np.searchsorted(-falling, -probs, side="left")]
    # At 1 the rule is off: the mass before a very rare token rounds to 1, and it would be dropped.
    nucleus = np.where((mass_before < params.top_p) | (params.top_p == 1), probs, 0)
    kept = np.where(nucleus >= params.min_p * nucleus.max(), nucleus, 0)
    return row, kept / kept.sum()


@pytest.fixture(scope="session")
def naive() -> Naive:
    return _naive


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[4] / "shared" / "golden"))
    if not folder.is_dir():
        pytest.skip(f"there are no golden runs at {folder}; set DSPARK_GOLDEN to their folder")
    return folder
