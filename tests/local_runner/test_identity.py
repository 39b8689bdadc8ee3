import threading
from types import ModuleType
from typing import Any

import pytest

from local_runner.engine import Decoding, DraftStyle
from local_runner.identity import first_difference, judge
from local_runner.prompts import Prompt
from local_runner.race import race
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed


class Nobody:
    """Draws nothing."""

    def begin(self, heat: Any) -> None:
        pass

    round = end = lambda self, *args: None


def verdict(engine: Any, style: DraftStyle = "greedy", sampling: dict[str, Any] | None = None) -> Any:
    decoding = Decoding(20, SamplingParams(seed=1, **(sampling or {})), Fixed(), style)
    runs = race(engine, [Prompt("a", "chat", ids=(1,)), Prompt("b", "chat", ids=(2,))], decoding, repeats=2,
                watcher=Nobody(), cancelled=threading.Event())  # fmt: skip
    return judge(engine, runs, decoding)


@pytest.mark.parametrize(
    ("plain", "other", "found"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 9, 3], (1, 2, 9)),
        ([1, 2], [1, 2, 3], (2, None, 3)),
        ([1, 2], [1], (1, 2, None)),
    ],
)
def test_first_difference(plain: list[int], other: list[int], found: object) -> None:
    assert first_difference(plain, other) == found


def test_equal_answers_are_identical(fake: ModuleType) -> None:
    identity = verdict(fake.FakeEngine())
    assert identity.verdict == "identical" and identity.compared == 80
    assert "all 80 tokens" in identity.sentence


def test_a_planted_token_is_a_failure_with_its_place_and_margin(fake: ModuleType) -> None:
    identity = verdict(fake.FakeEngine(flip=7, margin=0.5, noise=0.1))
    first = identity.differences[0]
    assert identity.verdict == "failure"
    assert (first.prompt, first.position, first.margin, first.dspark) == ("a", 7, 0.5, fake.WRONG)
    assert [d.prompt for d in identity.differences] == ["a", "b"], "repeats of the same difference are told once"
    for words in ("FAILURE", "at a, token 7", "0.5", "0.1"):
        assert words in identity.sentence


def test_a_near_tie_between_these_two_tokens_is_numerics(fake: ModuleType) -> None:
    identity = verdict(fake.FakeEngine(flip=7, margin=0.05, noise=0.1))
    assert identity.verdict == "numerics" and identity.width_noise == 0.1


def test_a_near_tie_between_other_tokens_excuses_nothing(fake: ModuleType) -> None:
    assert verdict(fake.FakeEngine(flip=7, margin=0.0, noise=0.1, best=(1, 2))).verdict == "failure"


def test_an_answer_that_ends_early_is_a_failure_even_at_a_near_tie(fake: ModuleType) -> None:
    identity = verdict(fake.FakeEngine(cut=9, margin=0.0, noise=9.0))
    assert identity.verdict == "failure"
    assert (identity.differences[0].position, identity.differences[0].dspark) == (9, None)


def test_sampled_drafts_with_temperature_are_not_compared(fake: ModuleType) -> None:
    identity = verdict(fake.FakeEngine(flip=7), style="sampled", sampling={"temperature": 0.8})
    assert identity.verdict == "not comparable" and identity.compared == 0
    assert verdict(fake.FakeEngine(flip=7), style="sampled").verdict == "failure", "greedy decoding is comparable"


@pytest.mark.parametrize(("noise", "expected"), [(0.1, "undecided"), (1e-5, "failure")])
@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"presence_penalty": 1.0}])
def test_where_the_margin_says_nothing_only_the_noise_decides(
    fake: ModuleType, noise: float, expected: str, sampling: dict[str, float]
) -> None:
    assert verdict(fake.FakeEngine(flip=7, margin=0.0, noise=noise), sampling=sampling).verdict == expected
    assert verdict(fake.FakeEngine(), sampling=sampling).verdict == "identical"
    assert verdict(fake.FakeEngine(cut=9, noise=noise), sampling=sampling).verdict == "failure", "ends are never noise"
