"""The second turn of a conversation is answered as by an engine that saw nothing before, and reads only what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from local_runner.engines.base import Request
from local_runner.engines.torch import TorchEngine
from local_runner.runner.profile import Profile
from local_runner.runner.runner import Runner
from sglang_dspark.decoding.adaptive import Adaptive
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed, Schedule
from sglang_dspark.errors import InputError

LONG = tuple((3 + 7 * i) % 61 for i in range(90))
Counted = tuple[TorchEngine, list[int]]


@pytest.fixture(params=[True, False], ids=["compiled", "plain"])
def pair(request: pytest.FixtureRequest, golden: Path, load: Callable[..., TorchEngine]) -> Callable[[], TorchEngine]:
    """pair(): an engine that has seen nothing; in bfloat16 on the kernel, or in float32."""
    folder = golden / "qwen3-vanilla"
    options = {"dtype": "bfloat16", "compile": True} if request.param else {"dtype": "float32", "compile": False}
    return lambda: load(folder / "target", folder / "draft", **options)


@pytest.fixture
def counted(pair: Callable[[], TorchEngine], monkeypatch: pytest.MonkeyPatch) -> Counted:
    """An engine that reuses prefixes, and how many tokens each of its forwards computed."""
    engine = pair()
    engine.reuse_prefix = True
    compute, counts = engine.target._run, list[int]()

    def run(tokens: Sequence[int], last_only: bool) -> Any:
        counts.append(len(tokens))
        return compute(tokens, last_only)

    monkeypatch.setattr(engine.target, "_run", run)
    return engine, counts


def answer(engine: Any, prompt: Sequence[int], schedule: Schedule | None) -> list[Round]:
    return list(engine.generate(Request(tuple(prompt), 12, SamplingParams(), schedule=schedule)))


def tokens(rounds: list[Round]) -> list[int]:
    return [t for r in rounds for t in r.committed]


@pytest.mark.parametrize("chunk", [256, 16])
@pytest.mark.parametrize("schedule", [None, Fixed()])
def test_a_second_turn(
    counted: Counted,
    pair: Callable[[], TorchEngine],
    schedule: Schedule | None,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("local_runner.engines.loop.PREFILL_CHUNK", chunk)
    engine, counts = counted
    said = tokens(answer(engine, LONG[:40], schedule))
    prompts = [
        ((*LONG[:40], *said, *LONG[60:80]), 40 + len(said) - 1),
        (LONG[:70], 40),
        (LONG[50:], 0),
        (LONG[50:], 39),
        (LONG[50:60], 9),
    ]
    for prompt, shared in prompts:
        counts.clear()
        got, expected = answer(engine, prompt, schedule), answer(pair(), prompt, schedule)
        assert [(r.drafted, r.committed) for r in got] == [(r.drafted, r.committed) for r in expected]
        read = sum(counts) - sum(1 + r.scheduled for r in got[1:])
        # An answer that the limit cut short leaves the rest of its last block in the cache.
        assert 0 <= len(prompt) - shared - read <= (engine.block if prompt == prompts[0][0] else 0)


def test_a_plain_answer_between_leaves_no_stale_drafts(counted: Counted, pair: Callable[[], TorchEngine]) -> None:
    """The target then holds tokens whose features the draft never saw."""
    engine, _ = counted
    answer(engine, LONG[:50], Fixed())
    answer(engine, (*LONG[:20], *LONG[60:90]), None)
    prompt = (*LONG[:20], *LONG[60:85])
    got, expected = answer(engine, prompt, Fixed()), answer(pair(), prompt, Fixed())
    assert [(r.drafted, r.committed) for r in got] == [(r.drafted, r.committed) for r in expected]


def test_measuring_and_refusals_leave_no_prefix_behind(counted: Counted, pair: Callable[[], TorchEngine]) -> None:
    engine, _ = counted
    answer(engine, LONG[:50], Fixed())
    engine.cost_curve(repeats=1)
    assert tokens(answer(engine, LONG[:60], Fixed())) == tokens(answer(pair(), LONG[:60], Fixed()))
    with pytest.raises(InputError, match="must be at least 1"):
        list(engine.generate(Request(LONG[:60], 0, SamplingParams(), schedule=Fixed())))
    assert engine.margin(LONG[:30], []) == pair().margin(LONG[:30], [])


def test_a_runner_reuses_what_its_engine_holds(counted: Counted, pair: Callable[[], TorchEngine]) -> None:
    engine, counts = counted
    rows = tuple(range(1, engine.block + 2))
    profile = Profile(1.0, 1.001, rows, tuple(1 + 0.01 * k for k in rows), 0.01, 0.0, (), ())
    runner = Runner(engine, profile)
    first = tokens(answer(runner, LONG[:40], Adaptive()))
    prompt = (*LONG[:40], *first, *LONG[60:80])
    counts.clear()
    got = answer(runner, prompt, Adaptive())
    assert tokens(got) == tokens(answer(pair(), prompt, None))
    assert sum(counts) - sum(1 + r.scheduled for r in got[1:]) <= len(prompt) - 40
