"""The runner changes no token, follows the target's distribution, and costs what it may and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from local_runner.engines.base import Draft, Request
from local_runner.engines.torch import TorchEngine
from local_runner.runner.drafter import Follower, Mixed
from local_runner.runner.profile import Profile
from local_runner.runner.runner import Runner
from local_runner.runner.trial import measure
from sglang_dspark.decoding.adaptive import BOUND, Adaptive, Policy
from sglang_dspark.decoding.rounds import Round, decode_rounds
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.errors import InputError

PROMPTS = ((1, 3, 1), (0,), (5, 4, 3, 2, 1, 0) * 4)
SAMPLED = SamplingParams(temperature=0.9, seed=21)
PROFILE = Profile(1.0, 1.002, (1, 2, 3, 4, 5), (1.002, 1.082, 1.132, 1.182, 1.222), 0.5, 0.0, (), ())
Engines = Callable[..., Any]


def tokens(rounds: Sequence[Round]) -> list[int]:
    return [t for r in rounds for t in r.committed]


def answer(
    runner: Runner, prompt: Sequence[int], count: int, params: SamplingParams, style: str = "greedy"
) -> list[Round]:
    return list(runner.generate(Request(tuple(prompt), count, params, schedule=Adaptive(), draft_style=style)))


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["confident", "silent", "alone", "good", "bad"])
def test_it_says_what_plain_decoding_says(engines: Engines, params: SamplingParams, kind: str) -> None:
    engine = engines(head=kind != "alone", confident=kind == "confident", good={"good": True, "bad": False}.get(kind))
    runner = Runner(engine, PROFILE)
    for prompt in PROMPTS:
        plain = list(runner.generate(Request(prompt, 300, params)))
        rounds = answer(runner, prompt, 300, params)
        assert tokens(rounds) == tokens(plain)
        assert all(b.position == a.position + len(a.committed) for a, b in pairwise(rounds))
    assert engine.drafter is None or type(engine.drafter).__name__ == "Drafter"


def test_every_source_has_its_turn(engines: Engines) -> None:
    runner = Runner(engines(vocab=12, confident=False), PROFILE)
    for seed in range(8):
        answer(runner, (seed, 3), 400, SamplingParams(temperature=0.6, seed=seed))
    sources = runner.statistics()
    assert all(sources[s]["rounds"] > 0 for s in ("head", "lookup"))
    assert all(t["accepted"] <= t["scheduled"] <= t["drafted"] for t in sources.values())
    assert runner.description["runner"]["sources"] == sources and runner.description["engine"] == "tables"


def test_rounds_and_tallies_agree(engines: Engines) -> None:
    runner = Runner(engines(), PROFILE)
    rounds = decode_rounds(answer(runner, (1, 3), 500, SAMPLED))
    sources = runner.statistics().values()
    assert sum(t["rounds"] for t in sources) == len(rounds)
    for name in ("scheduled", "accepted"):
        assert sum(t[name] for t in sources) == sum(getattr(r, name) for r in rounds)
    assert sum(t["drafted"] for t in sources) == sum(len(r.drafted) for r in rounds)


def test_look_up_reads_what_was_said(engines: Engines) -> None:
    """Whoever drafted it: its text is the prompt and the answer, but the last round, which nothing follows."""
    runner = Runner(engines(), PROFILE)
    lookup = runner.mixed._lookup
    assert lookup is not None
    for prompt in PROMPTS:
        rounds = answer(runner, prompt, 200, SAMPLED)
        assert lookup.tokens == [*prompt, *tokens(rounds[:-1])]
        assert any(r.accepted for r in rounds)


def test_the_same_measurements_give_the_same_rounds(engines: Engines) -> None:
    def run() -> list[list[Round]]:
        runner = Runner(engines(), PROFILE)
        return [answer(runner, p, 200, SAMPLED, "sampled") for p in PROMPTS]

    def bare(answers: list[list[Round]]) -> list[Any]:
        return [(r.drafted, r.scheduled, r.accepted, r.committed) for rounds in answers for r in rounds]

    assert bare(run()) == bare(run())


@pytest.mark.parametrize("confident", [True, False])
def test_a_head_that_never_helps_costs_at_most_the_bound(engines: Engines, clock: Any, confident: bool) -> None:
    engine = engines(vocab=6, good=False, confident=confident)
    runner = Runner(engine, measure(engine, (1, 3), budget_s=1e4, clock=clock))
    runner.mixed._lookup = None  # which would win here, where a token says all about the next
    engine.drafter.table = engine.drafter.table.roll(1, -1)
    total, plain = 0.0, 0.0
    for seed in range(10):
        params = SamplingParams(temperature=0.9, seed=seed)
        for schedule in (None, Adaptive()):
            rounds = decode_rounds(runner.generate(Request((1, 3), 300, params, schedule=schedule)))
            seconds = sum(r.draft_s + r.verify_s for r in rounds)
            total, plain = (total + seconds, plain) if schedule else (total, plain + seconds)
    assert plain < total <= (1 + BOUND) * plain
    assert runner.policy.parked and runner.statistics()["head"]["rounds"] > 0


def test_a_head_that_helps_is_used(engines: Engines, clock: Any) -> None:
    engine = engines(good=True, confident=False)
    runner = Runner(engine, measure(engine, (1, 3), budget_s=1e4, clock=clock))
    runner.mixed._lookup = None
    rounds = decode_rounds(answer(runner, (1, 3), 1000, SamplingParams()))
    seconds = sum(r.draft_s + r.verify_s for r in rounds)
    assert seconds < 1.02 * 1000 / 5 * 1.724


def test_features_are_given_up_where_they_cost_too_much(engines: Engines, clock: Any) -> None:
    engine = engines(good=False, confident=False, tap_s=0.2)
    runner = Runner(engine, measure(engine, (1, 3), budget_s=1e4, clock=clock))
    runner.mixed._lookup = None
    answer(runner, (1, 3), 300, SAMPLED)
    assert not runner.policy.following
    assert engine.target.taps == (0,), "what was changed for the answer is as it was"
    before, passes = clock.now, len(engine.target.calls)
    answer(runner, (1, 3), 100, SAMPLED)
    untapped = sum(engine.target.seconds[rows - 1] for rows in engine.target.calls[passes:])
    assert clock.now - before == pytest.approx(untapped), "no forward was tapped"
    assert engine.target.taps == (0,)


@pytest.mark.parametrize("schedule", [Adaptive()])
def test_it_needs_a_runner(engines: Engines, schedule: Adaptive) -> None:
    with pytest.raises(InputError, match="adaptive"):
        list(engines().generate(Request((1, 3), 5, SamplingParams(), schedule=schedule)))


def test_the_end_of_the_context(engines: Engines) -> None:
    for room in range(4, 30):
        engine = engines(good=True, context=room)
        runner = Runner(engine, PROFILE)
        plain = list(runner.generate(Request((1, 3), 100, SamplingParams())))
        rounds = answer(runner, (1, 3), 100, SamplingParams())
        assert tokens(rounds) == tokens(plain) and rounds[-1].stop == plain[-1].stop == "context"


V, TOKENS = 4, 12_000
PASSES, REJECTS = 1e-4, 1e-9


def p_value(engine: Any, runner: Runner, naive: Any) -> float:
    """Of a χ² test of what follows each pair of tokens in one long answer of sampled drafts."""
    said = [1, 3, 1, *tokens(answer(runner, (1, 3, 1), TOKENS, SAMPLED, "sampled"))]
    observed = np.zeros((V, V, V))
    for a, b, c in zip(said[1:-2], said[2:-1], said[3:], strict=True):
        observed[a, b, c] += 1
    table = engine.target.table.numpy()
    exact = np.array([[naive(table[a, b], SAMPLED, (), ())[1] for b in range(V)] for a in range(V)])
    expected = observed.sum(-1, keepdims=True) * exact
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), V * V * (V - 1)))


class Peeking(Policy):
    """Verifies a block by what its tokens are."""

    drafted: Sequence[int] = ()

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        super().length(confidence, drafted)
        return sum(token % 2 for token in self.drafted[:2])


class Dropping(Mixed):
    """Draws a block, and keeps it only if it likes it."""

    def draft(self, anchor: int, position: int, choose: Any = None) -> Draft:
        block = super().draft(anchor, position, choose)
        return Draft([]) if block.tokens and block.tokens[0] == 2 else block


CHEAP = Profile(1.0, 1.0, (1, 2, 3, 4), (1.0, 1.01, 1.02, 1.03), 0.0, 0.0, (), ())


@pytest.mark.slow
@pytest.mark.parametrize("confident", [True, False])
def test_sampling_through_the_runner(engines: Engines, naive: Any, confident: bool) -> None:
    engine = engines(vocab=V, block=3, confident=confident)
    runner = Runner(engine, CHEAP)
    assert p_value(engine, runner, naive) > PASSES
    assert runner.statistics()["head"]["rounds"] > TOKENS / 5


@pytest.mark.slow
def test_a_policy_that_peeks_shows(engines: Engines, naive: Any) -> None:
    engine = engines(vocab=V, block=3)
    runner = Runner(engine, CHEAP)
    peeking = Peeking(CHEAP.costs(), 3, head=True, longest=4)
    runner.policy = runner.mixed.chooser = peeking
    draft = runner.mixed.draft

    def shown(*args: Any) -> Any:
        block = draft(*args)
        peeking.drafted = block.tokens
        return block

    runner.mixed.draft = shown  # type: ignore[method-assign, assignment]
    assert p_value(engine, runner, naive) < REJECTS


@pytest.mark.slow
def test_a_source_chosen_by_its_draft_shows(engines: Engines, naive: Any) -> None:
    engine = engines(vocab=V, block=3)
    runner = Runner(engine, CHEAP)
    runner.mixed = Dropping(runner.policy, engine.drafter, 3, None)
    assert p_value(engine, runner, naive) < REJECTS


@pytest.fixture(scope="module")
def pair(golden: Path, load: Callable[..., TorchEngine]) -> TorchEngine:
    folder = golden / "qwen3-vanilla"
    return load(folder / "target", folder / "draft", context_length=512)


def test_features_taken_in_late_are_the_same_features(pair: TorchEngine) -> None:
    """The head drafts the same after rows that waited as after rows that did not."""
    head = pair.drafter
    assert head is not None
    text = [(7 * i) % 90 for i in range(40)]

    def drafts(observer: Any) -> list[Any]:
        pair.target.reset()
        observer.reset()
        pair.target.forward(text[:20], last_only=True)
        observer.observe(20)
        for token in text[20:]:
            pair.target.forward([token, 1, 2])
            pair.target.truncate(pair.target.length - 2)
            observer.observe(1)
        return [observer.draft(5, 40, None)]

    (early,), (late,) = drafts(head), drafts(Follower(head))
    assert late.tokens == early.tokens and late.confidence == pytest.approx(early.confidence, abs=1e-5)


def test_long_prompts_are_not_kept_waiting(pair: TorchEngine) -> None:
    follower = Follower(pair.drafter)  # type: ignore[arg-type]
    pair.target.reset()
    follower.reset()
    for _ in range(2):
        pair.target.forward([3] * 256, last_only=True)
        follower.observe(256)
        assert not follower._rows


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, top_k=8, seed=5)])
def test_a_real_pair(pair: TorchEngine, params: SamplingParams) -> None:
    runner = Runner(pair, measure(pair, range(20), budget_s=1.0))
    assert runner.block == pair.block and runner.has_confidence == pair.has_confidence
    for prompt in (range(1, 40), [7]):
        request = Request(tuple(prompt), 120, params)
        assert tokens(answer(runner, tuple(prompt), 120, params)) == tokens(list(pair.generate(request)))


def test_a_real_target_alone(golden: Path, load: Callable[..., TorchEngine]) -> None:
    engine = load(golden / "qwen3-vanilla" / "target", context_length=300)
    runner = Runner(engine, measure(engine, range(20), budget_s=1.0))
    assert runner.block == 7 and runner.width_noise(range(30)) < 1e-3
    prompt = tuple(range(1, 40)) * 2
    plain = list(engine.generate(Request(prompt, 80, SamplingParams())))
    assert tokens(answer(runner, prompt, 80, SamplingParams())) == tokens(plain)
    assert torch.is_tensor(engine.target.lm_head) and engine.drafter is None
