"""Statistics over rounds against scipy, numpy and counting by hand."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.training.statistics import auc, confidence_statistics, interval, judged, statistics

BLOCK = 3


def round_(index: int, scheduled: int, accepted: int, confidence: Sequence[float] = (0.9, 0.5, 0.2)) -> Round:
    drafted = (1, 2, 3) if index else ()
    confidence = tuple(confidence) if index else ()
    committed = (*drafted[:accepted], 9)
    return Round("r", index, 5, 4, drafted, confidence, scheduled, accepted, 9, committed, None, 0.25, 0.75)


def answer(*lengths: tuple[int, int]) -> list[Round]:
    """A prefill and then rounds of (scheduled, accepted)."""
    return [round_(0, 0, 0), *(round_(i, *pair) for i, pair in enumerate(lengths, start=1))]


def test_a_task_is_summarised_as_by_hand() -> None:
    found = statistics([answer((3, 3), (3, 0)), answer((2, 2), (3, 1), (0, 0))], BLOCK)
    assert (found["prompts"], found["rounds"], found["drafted"], found["scheduled"], found["accepted"]) == (
        2,
        5,
        15,
        11,
        6,
    )
    assert found["tokens"] == 2 + 6 + 5 and found["mean_accepted_length"] == pytest.approx(11 / 5)
    assert found["draft_acceptance_rate"] == pytest.approx(6 / 11)
    assert found["survival"] == [3 / 4, 2 / 4, 1 / 3] and found["conditional"] == [3 / 4, 2 / 3, 1.0]
    assert found["tokens_per_s"] == pytest.approx(11 / 5) and found["ttft_s"] == 1.0
    assert found["confidence"]["judged"] == [4, 3, 1]


def test_only_what_was_verified_after_accepted_tokens_is_judged() -> None:
    found = judged(answer((3, 1), (1, 1), (2, 0), (0, 0)), BLOCK)
    assert [(c.tolist(), a.tolist()) for c, a in found] == [
        ([0.9, 0.9, 0.9], [1, 1, 0]),
        ([0.5], [0]),
        ([], []),
    ]


def test_rounds_without_confidence_have_no_statistics_of_it() -> None:
    rounds = [round_(0, 0, 0), round_(1, 3, 2, ())]
    assert confidence_statistics(rounds, BLOCK) is None and confidence_statistics([], 0) is None
    assert statistics([rounds], BLOCK)["confidence"] is None


def test_plain_decoding_commits_one_token_a_round() -> None:
    plain = [Round("r", i, 5, 4, (), (), 0, 0, 9, (9,), None, 0.0, 0.5) for i in range(4)]
    found = statistics([plain, plain], 0)
    assert found["mean_accepted_length"] == 1.0 and found["draft_acceptance_rate"] is None
    assert found["survival"] == [] and found["mean_accepted_length_95"] == (1.0, 1.0)


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.7]) | st.floats(0, 1), st.booleans()), max_size=50))
def test_auc_is_the_mann_whitney_statistic(pairs: list[tuple[float, bool]]) -> None:
    won, lost = [s for s, o in pairs if o], [s for s, o in pairs if not o]
    found = auc([s for s, _ in pairs], [o for _, o in pairs])
    if not won or not lost:
        assert found is None
    else:
        assert found == pytest.approx(mannwhitneyu(won, lost).statistic / (len(won) * len(lost)))


def test_calibration_error_and_auc_of_a_head_that_knows() -> None:
    rng = np.random.default_rng(0)
    rounds = [round_(0, 0, 0)]
    for index in range(1, 6001):
        c = rng.random(3)
        accepted = int((rng.random(3) < c).cumprod().sum())
        rounds.append(round_(index, 3, accepted, c.tolist()))
    found = confidence_statistics(rounds, BLOCK)
    assert found is not None and found["auc"] == pytest.approx(5 / 6, abs=0.02), "for p uniform on [0, 1]"
    assert found["ece"] < 0.02 and max(found["ece_by_position"]) < 0.05
    assert sum(found["reliability"]["counts"]) == sum(found["judged"])
    sure = [
        r if r.index == 0 else round_(r.index, 3, r.accepted, [min(1.0, c + 0.3) for c in r.confidence]) for r in rounds
    ]
    shifted = confidence_statistics(sure, BLOCK)
    assert shifted is not None and shifted["ece"] > 0.2


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits, trials = 0, 200
    for trial in range(trials):
        # Prompts differ from each other more than rounds within them do: drawing rounds would be far too sure.
        prompts = [answer(*((3, int(k)) for k in rng.binomial(3, p, size=12))) for p in rng.uniform(0.1, 0.9, size=40)]
        low, high = interval([prompts], samples=300, seed=trial) or (0.0, 0.0)
        hits += low <= 2.5 <= high
    assert 0.89 <= hits / trials <= 0.99


def test_the_interval_of_several_tasks_is_of_their_mean() -> None:
    good, bad = [answer((3, 3), (3, 3))] * 3, [answer((3, 0))] * 3
    assert interval([good, bad]) == (2.5, 2.5)
    mixed = [answer((3, k)) for k in (0, 1, 2, 3, 0, 3)]
    low, high = interval([mixed]) or (0.0, 0.0)
    assert low < fmean((1, 2, 3, 4, 1, 4)) < high
    assert interval([mixed]) == interval([mixed]), "the draws are seeded"
    assert interval([]) is None and interval([good, good[:1]]) is None
    assert interval([[*good, answer()]]) == (4.0, 4.0), "a prompt that ended with its first token has no rounds"
