"""Prompt look-up drafts what it should, learns what the target agreed with, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from local_runner.engines.base import Request
from local_runner.engines.lookup import LookupDrafter, LookupEngine
from local_runner.engines.loop import decode
from local_runner.engines.torch import TorchEngine
from sglang_dspark.decoding.lookup import Lookup
from sglang_dspark.decoding.rounds import Round, summarise
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Algorithm1, CostCurve, Fixed, Threshold
from sglang_dspark.errors import InputError

PROMPTS = ((7,), tuple(range(1, 40)) * 2)
SAMPLED = SamplingParams(temperature=0.7, top_k=8, repetition_penalty=1.05, seed=5)


@pytest.fixture(scope="module")
def engines(golden: Path, load: Callable[..., TorchEngine]) -> tuple[Any, Any]:
    """Plain decoding, and look-up on the same target."""
    plain = load(golden / "qwen3-vanilla" / "target", context_length=200)
    return plain, LookupEngine(plain)


def tokens(rounds: list[Round]) -> list[int]:
    return [t for r in rounds for t in r.committed]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
@pytest.mark.parametrize("schedule", [Fixed(), Fixed(2), Algorithm1(CostCurve((1, 8), (1.0, 1.5)))])
def test_it_says_what_plain_decoding_says(engines: tuple[Any, Any], sampling: SamplingParams, schedule: Any) -> None:
    plain, lookup = engines
    for prompt in PROMPTS:
        expected = list(plain.generate(Request(prompt, 40, sampling)))
        rounds = list(lookup.generate(Request(prompt, 40, sampling, schedule=schedule)))
        assert tokens(rounds) == tokens(expected)
        before = [sum(len(r.committed) for r in rounds[:i]) for i in range(len(rounds))]
        assert [r.position for r in rounds] == [len(prompt) - 1 + n for n in before], (
            "nothing is cached that was not said"
        )


def test_greedy_repetitions_take_fewer_passes(engines: tuple[Any, Any]) -> None:
    rounds = list(engines[1].generate(Request(PROMPTS[0], 60, SamplingParams(), schedule=Fixed())))
    made = summarise(rounds)
    assert made.accepted > 0 and made.rounds < 59
    assert engines[1].block == 7 and engines[1].has_confidence and engines[1].description["draft"] == "prompt look-up"


def test_the_prompt_is_drafted_from(engines: tuple[Any, Any]) -> None:
    every = tuple(range(192))
    prefill, first = list(engines[1].generate(Request(every, 2, SamplingParams(), schedule=Fixed())))[:2]
    text = Lookup()
    text.extend((*every, *prefill.committed))
    assert list(first.drafted) == text.propose(7)[0] != []


def test_drafts_that_should_be_drawn_are_refused(engines: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match="no distribution"):
        list(engines[1].generate(Request((1,), 5, SAMPLED, schedule=Fixed(), draft_style="sampled")))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=3)])
@pytest.mark.parametrize("schedule", [Fixed(), Fixed(2), Threshold(0.45)])
def test_drafts_and_confidences_follow_from_the_rounds_before(
    tables: Callable[..., Any], sampling: SamplingParams, schedule: Any
) -> None:
    target, _ = tables(vocab=6)
    drafter, longest, block = LookupDrafter(block=4, longest=3), 3, 4
    tried, right = [2] * (longest + block), [1] * (longest + block)
    drafted_any = False
    for prompt in ((1, 2, 3, 1, 2), (0, 4, 4)):
        drafter.begin(prompt)
        rounds = list(decode(target, drafter, Request(prompt, 80, sampling, schedule=schedule)))
        text = Lookup(longest)
        text.extend((*prompt, *rounds[0].committed))
        for r in rounds[1:]:
            drafted, match = text.propose(block)
            assert list(r.drafted) == drafted
            assert list(r.confidence) == [right[match + k] / tried[match + k] for k in range(len(drafted))]
            drafted_any = drafted_any or r.accepted > 0
            if r is not rounds[-1]:  # what follows the last block is never drafted from
                for k in range(min(r.accepted + 1, len(drafted))):
                    tried[match + k] += 1
                    right[match + k] += k < r.accepted or r.next_token == drafted[k]
            text.extend(r.committed)
    assert drafted_any and max(tried) > 10
