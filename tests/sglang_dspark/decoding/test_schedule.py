"""Schedules against golden runs, Algorithm 1 against brute force, and cost curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.decoding.schedule import (
    Algorithm1,
    CostCurve,
    Fixed,
    Schedule,
    Threshold,
    algorithm1,
    parse_schedule,
    survival,
)
from sglang_dspark.errors import InputError

Rate = Callable[[int], float]
CONFIDENCE = st.floats(0, 1) | st.sampled_from([0.0, 0.5, 0.9, 1.0])
BLOCKS = st.lists(st.lists(CONFIDENCE, max_size=4), min_size=1, max_size=3)
CURVE = CostCurve((1, 2, 4), (1.0, 1.5, 3.5))


def theta(survivals: list[list[float]], lengths: tuple[int, ...], rate: Rate) -> float:
    admitted = [a for request, n in zip(survivals, lengths, strict=True) for a in request[:n]]
    return (len(survivals) + sum(admitted)) * rate(len(survivals) + len(admitted))


def convex(steps: list[float]) -> Rate:
    """The step rate of a cost that grows by ever greater steps: then Θ over admissions rises, and then falls."""
    steps = sorted(steps)
    return lambda rows: 1 / (1 + sum(steps[: rows - 1]))


EXTREMES = st.lists(st.sampled_from([0.05, 0.6, 0.95]), min_size=3, max_size=3)
STAIRS = st.lists(st.sampled_from([0.02, 2.0]), min_size=12, max_size=12)
"""What each further row adds to the cost: Θ falls and rises again."""
STEPS = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.25]), min_size=15, max_size=15)


@given(BLOCKS, STEPS)
def test_algorithm_1_is_the_best_choice_of_prefixes_on_unimodal_curves(
    blocks: list[list[float]], steps: list[float]
) -> None:
    survivals, rate = [survival(block) for block in blocks], convex(steps)
    lengths = tuple(algorithm1(survivals, rate))
    best = max(theta(survivals, choice, rate) for choice in product(*(range(len(s) + 1) for s in survivals)))
    assert theta(survivals, lengths, rate) == pytest.approx(best, rel=1e-12)


@settings(max_examples=500)
@given(st.lists(EXTREMES, min_size=1, max_size=3), STAIRS, st.integers(0, 3), EXTREMES)
def test_admission_of_a_token_never_depends_on_later_ones(
    blocks: list[list[float]], costs: list[float], k: int, other: list[float]
) -> None:
    """On any curve, what a request's confidences are from c_{k+1} on does not change whether token k is admitted."""

    def admitted(block: list[float]) -> int:
        lengths = algorithm1([survival(b) for b in [block, *blocks[1:]]], lambda rows: 1 / sum(costs[:rows]))
        return min(lengths[0], k)

    assert admitted(blocks[0]) == admitted(blocks[0][:k] + other[k:])


def test_the_best_length_of_a_whole_block_does_depend_on_later_tokens() -> None:
    """Without early stop, on a curve with a step, c_2, which sees token 1, decides whether token 1 is verified."""
    rate = CostCurve((1, 2, 3), (1.0, 1.6, 1.65)).steps_per_second

    def best(confidence: list[float]) -> int:
        survivals = [survival(confidence)]
        return max(range(3), key=lambda n: theta(survivals, (n,), rate))

    assert (best([0.5, 0.1]), best([0.5, 0.95])) == (0, 2)
    assert algorithm1([survival([0.5, 0.1])], rate) == algorithm1([survival([0.5, 0.95])], rate) == [0]


def test_algorithm_1_by_hand() -> None:
    survivals = [[0.9, 0.5, 0.1], [0.9, 0.8]]
    # Cost 1 up to 4 rows and 1.5 from 5: these yield (2 + 0.9 + 0.9) / 1, and a fifth (2 + 0.9 + 0.9 + 0.8) / 1.5.
    assert algorithm1(survivals, lambda rows: 1.0 if rows <= 4 else 1 / 1.5) == [1, 1]
    assert algorithm1(survivals, lambda rows: 1.0) == [3, 2], "free rows are all taken"
    assert algorithm1(survivals, lambda rows: 1.0 if rows <= 3 else 1e-9) == [1, 0], "ties go to the first request"
    assert algorithm1([[0.5, 0.5], [0.5]], lambda rows: 1.0 if rows <= 4 else 1e-9) == [1, 1], "first tokens come first"
    assert algorithm1([[0.0, 0.0]], lambda rows: 1.0) == [0], "what cannot survive does not raise the rate"
    assert algorithm1([], lambda rows: 1.0) == []


def test_drafting_time_is_part_of_the_step() -> None:
    confidence, free = [0.6, 0.6], CostCurve((1, 3), (1.0, 3.0))
    assert Algorithm1(free).length(confidence, 2) == 0
    assert Algorithm1(CostCurve(free.rows, free.seconds, draft_s=2.0)).length(confidence, 2) == 1


@pytest.mark.parametrize("draft", ["qwen3-vanilla", "qwen3-gated", "qwen3-rnn", "qwen3-dflash", "gemma4-vanilla"])
def test_thresholds_schedule_what_the_golden_runs_did(golden: Path, draft: str) -> None:
    runs = json.loads((golden / draft / "golden.json").read_text())
    checked = 0
    for run in runs:
        schedule = Threshold(run["confidence_threshold"])
        for r in run["rounds"]:
            confidence = [1 / (1 + math.exp(-x)) for x in r["confidence_logits"] or ()]
            assert schedule.length(confidence, len(r["drafted_full"])) == r["scheduled"]
            checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("schedule", "confidence", "length"),
    [
        (Fixed(), [], 3),
        (Fixed(2), [], 2),
        (Fixed(9), [], 3),
        (Fixed(0), [], 0),
        (Threshold(0.0), [0.0, 0.0, 0.0], 3),
        (Threshold(0.5), [0.5, 0.4, 0.9], 1),
        (Threshold(0.5), [0.4, 0.9, 0.9], 0),
        (Threshold(0.5), [], 3),
        (Threshold(1.0), [1.0, 1.0, 1.0], 3),
        (Algorithm1(CURVE), [0.9, 0.9, 0.9], 1),
        (Algorithm1(CURVE), [0.4, 1.0, 1.0], 0),
    ],
)
def test_lengths(schedule: Schedule, confidence: list[float], length: int) -> None:
    assert schedule.length(confidence, 3) == length


def test_schedules_say_whether_they_use_confidence() -> None:
    schedules: list[Schedule] = [Fixed(2), Threshold(0.0), Threshold(0.1), Algorithm1()]
    assert [schedule.uses_confidence for schedule in schedules] == [False, False, True, True]


@pytest.mark.parametrize("text", ["fixed", "fixed:3", "threshold:0.4", "algorithm1"])
def test_schedules_are_chosen_by_name(text: str) -> None:
    assert str(parse_schedule(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "fixed:",
        "fixed:x",
        "fixed:-1",
        "fixed:1.5",
        "threshold",
        "threshold:2",
        "threshold:nan",
        "algorithm1:3",
    ],
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=rf"'{text}.*\.$"):
        parse_schedule(text)


def test_algorithm_1_refuses_what_it_cannot_judge() -> None:
    with pytest.raises(InputError, match="needs 3 confidences, but the draft gave 0"):
        Algorithm1(CURVE).length([], 3)
    with pytest.raises(InputError, match="needs a measured cost curve"):
        Algorithm1().length([0.5] * 3, 3)


def test_cost_curve_interpolates_extrapolates_and_never_falls() -> None:
    assert [CURVE.verify_s(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.5, 3.5, 5.5]
    noisy = CostCurve((2, 3, 5, 8), (3.0, 2.5, 4.0, 3.9), draft_s=1.0)
    assert noisy.seconds == (3.0, 3.0, 4.0, 4.0)
    assert [noisy.verify_s(rows) for rows in (1, 2, 3, 4, 20)] == [3.0, 3.0, 3.0, 3.5, 4.0]
    assert noisy.steps_per_second(5) == 1 / 5
    assert CostCurve.from_dict(json.loads(noisy.to_json())) == noisy


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"rows": [1, 2], "seconds": 3},
        {"rows": [1], "seconds": [1.0]},
        {"rows": [1, 2], "seconds": [1.0]},
        {"rows": [0, 2], "seconds": [1.0, 1.0]},
        {"rows": [2, 2], "seconds": [1.0, 1.0]},
        {"rows": [1, 2], "seconds": [1.0, 0.0]},
        {"rows": [1, 2], "seconds": [1.0, float("nan")]},
        {"rows": [1, 2], "seconds": [1.0, "x"]},
        {"rows": [1, None], "seconds": [1.0, 1.0]},
        {"rows": [1, 2], "seconds": [1.0, 1.0], "draft_s": -1.0},
    ],
)
def test_bad_cost_curves_are_refused(data: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"^A cost curve.*\.$"):
        CostCurve.from_dict(data)
