"""The Round event keeps its invariants, survives JSON, and its metrics are what their names say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_dspark.decoding.rounds import (
    Round,
    conditional_by_position,
    decode_rounds,
    summarise,
    survival_by_position,
)
from sglang_dspark.errors import InputError


def a_round(**changes: Any) -> Round:
    values: dict[str, Any] = {
        "request": "é0",
        "index": 1,
        "position": 7,
        "anchor": 3,
        "drafted": (4, 5, 6),
        "confidence": (0.9, 0.5, 0.25),
        "scheduled": 2,
        "accepted": 1,
        "next_token": 8,
        "committed": (4, 8),
        "stop": None,
        "draft_s": 0.25,
        "verify_s": 0.75,
    }
    return Round(**(values | changes))


PREFILL = {"index": 0, "drafted": (), "confidence": (), "scheduled": 0, "accepted": 0, "committed": (8,)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PREFILL,
        {"stop": "eos", "committed": (4,)},
        {"stop": "cancelled", "committed": ()},
        {"confidence": ()},
        {"scheduled": 3, "accepted": 3, "committed": (4, 5, 6, 8)},
    ],
)
def test_a_round_survives_json(changes: dict[str, Any]) -> None:
    line = a_round(**changes).to_json()
    assert "\n" not in line
    assert Round.from_dict(json.loads(line)) == a_round(**changes)


INCONSISTENT: list[dict[str, Any]] = [
    {"scheduled": 4},
    {"accepted": 3},
    {"accepted": -1},
    {"committed": (4, 5, 8)},
    {"committed": (4,)},
    {"stop": "eos", "committed": (5,)},
    {"stop": "bored"},
]


@pytest.mark.parametrize("changes", INCONSISTENT)
def test_an_inconsistent_round_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="round 1"):
        a_round(**changes)
    data = json.loads(a_round().to_json()) | {k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}
    with pytest.raises(InputError, match=r"inconsistent.*\.$"):
        Round.from_dict(data)


def test_a_malformed_round_is_refused_by_field() -> None:
    data = json.loads(a_round().to_json())
    with pytest.raises(InputError, match="lacks anchor, stop;"):
        Round.from_dict({k: v for k, v in data.items() if k not in ("anchor", "stop")})
    with pytest.raises(InputError, match="'drafted' must be a list, not int"):
        Round.from_dict(data | {"drafted": 4})
    with pytest.raises(InputError, match="inconsistent"):
        Round.from_dict(data | {"accepted": "one"})


ROUNDS = [
    a_round(**PREFILL, draft_s=0.0, verify_s=2.0),
    a_round(scheduled=3, accepted=3, committed=(4, 5, 6, 8)),
    a_round(scheduled=3, accepted=1),
    a_round(scheduled=1, accepted=0, committed=(8,)),
    a_round(scheduled=0, accepted=0, committed=(8,)),
    a_round(scheduled=3, accepted=2, stop="length", committed=(4,), verify_s=1.75),
]


def test_summary() -> None:
    summary = summarise(ROUNDS)
    assert (summary.rounds, summary.tokens, summary.drafted) == (5, 10, 15)
    assert (summary.scheduled, summary.accepted) == (10, 6)
    assert summary.mean_accepted_length == (4 + 2 + 1 + 1 + 3) / 5, "bonus included, before the cut at the stop"
    assert summary.draft_acceptance_rate == 0.6
    assert (summary.ttft_s, summary.seconds, summary.tokens_per_s) == (2.0, 6.0, 9 / 6)
    assert decode_rounds(ROUNDS) == ROUNDS[1:]


def test_summary_of_several_requests_and_of_nothing() -> None:
    twice = summarise([*ROUNDS, a_round(**PREFILL, draft_s=0.0, verify_s=4.0)])
    assert (twice.ttft_s, twice.tokens, twice.rounds) == (3.0, 11, 5)
    nothing = summarise([])
    assert nothing.mean_accepted_length is None and nothing.draft_acceptance_rate is None
    assert (nothing.tokens_per_s, nothing.ttft_s) == (0.0, 0.0)


def test_acceptance_by_position() -> None:
    assert survival_by_position(ROUNDS, 4) == [3 / 4, 2 / 3, 1 / 3, None]
    assert conditional_by_position(ROUNDS, 4) == [3 / 4, 2 / 3, 1 / 2, None]
