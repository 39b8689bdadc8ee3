"""The default pair decodes real text: what DSpark says is what plain decoding says, and it takes fewer passes.

These tests run where the pair is on this disk (`dspark models pull` fetches it) and are slow: the one in float32 takes
a quarter of an hour. `DSPARK_TEST_PROMPTS` limits how many of the built-in prompts they decode.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from local_runner.engine import Decoding
from local_runner.engines.torch import TorchEngine, load_engine
from local_runner.identity import Identity, judge
from local_runner.pairs import DEFAULT_PAIR
from local_runner.prompts import read_prompts, take
from local_runner.race import Run, race
from local_runner.store import resolve_pair
from sglang_dspark.decoding.rounds import summarise
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed, Schedule, Threshold
from sglang_dspark.errors import InputError
from sglang_dspark.native.build import find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

Race = Callable[..., tuple[list[Run], Identity]]


class Unwatched:
    """Nobody follows the race."""

    def begin(self, *_: Any) -> None: ...

    def round(self, *_: Any) -> None: ...

    def end(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def engine() -> Iterator[Callable[[str, bool], TorchEngine]]:
    """engine(dtype, compile): the default pair, read once for each."""
    try:
        pair = resolve_pair(DEFAULT_PAIR)
    except InputError as error:
        pytest.skip(f"the default pair is not here: {error}")
    threads = torch.get_num_threads()
    yield cache(lambda dtype, compile: load_engine(pair.target_path, pair.draft_path, dtype=dtype, compile=compile))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def raced(engine: Callable[[str, bool], TorchEngine]) -> Race:
    """raced(dtype, compile, tokens): the race over the built-in prompts, and the verdict on it."""
    prompts = take(read_prompts(), int(os.environ.get("DSPARK_TEST_PROMPTS", "1000")))

    @cache
    def run(dtype: str, compile: bool, tokens: int, schedule: Schedule | None = None) -> tuple[list[Run], Identity]:
        decoding = Decoding(tokens, SamplingParams(), schedule or Fixed())
        one = engine(dtype, compile)
        runs = race(one, prompts, decoding, repeats=1, watcher=Unwatched(), cancelled=threading.Event())
        assert len(runs) == 2 * len(prompts)
        return runs, judge(one, runs, decoding)

    return run


def mean_accepted_length(runs: Sequence[Run]) -> float:
    rounds = [r for run in runs if run.heat.mode == "dspark" for r in run.rounds]
    mean = summarise(rounds).mean_accepted_length
    assert mean is not None
    return mean


needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


@needs_compiler
def test_the_compiled_mode_is_identical(raced: Race) -> None:
    """In bfloat16, where rows are bit-equal at any width: no near-tie can flip."""
    runs, identity = raced("bfloat16", True, 64)
    assert identity.verdict == "identical", identity.sentence
    assert identity.compared > 30 * len(runs) // 2


@needs_compiler
def test_it_is_identical_whatever_is_scheduled(raced: Race) -> None:
    _, identity = raced("bfloat16", True, 64, Threshold(0.4))
    assert identity.verdict == "identical", identity.sentence


@needs_compiler
def test_drafts_are_accepted(raced: Race) -> None:
    assert mean_accepted_length(raced("bfloat16", True, 64)[0]) > 1.2


def test_bfloat16_differs_by_near_ties_only(raced: Race) -> None:
    runs, identity = raced("bfloat16", False, 64)
    assert identity.verdict in ("identical", "numerics"), identity.sentence
    assert mean_accepted_length(runs) > 1.2


def test_float32_is_identical(raced: Race) -> None:
    runs, identity = raced("float32", False, 256)
    assert identity.verdict == "identical", identity.sentence
    assert mean_accepted_length(runs) > 1.2


@needs_compiler
def test_a_chat_answer_ends_where_the_model_ends_it(engine: Callable[[str, bool], TorchEngine]) -> None:
    """Two modes, one answer, with the end of turn as its last token."""
    one = engine("bfloat16", True)
    ids = one.encode_chat([{"role": "user", "content": "Answer with one word: what colour is the sky?"}])
    decoding = Decoding(120, SamplingParams(), Fixed())
    answers = []
    for mode in ("plain", "dspark"):
        rounds = list(one.generate(decoding.request(one, ids, mode, "0")))
        answers.append([t for r in rounds for t in r.committed])
        assert rounds[-1].stop == "eos"
    assert answers[0] == answers[1] and answers[0][-1] in one.stop_ids
    assert one.decode(answers[0]).strip() and "<|" not in one.decode(answers[0])


@needs_compiler
def test_sampling_with_greedy_drafts_is_plain_sampling(engine: Callable[[str, bool], TorchEngine]) -> None:
    """Token for token with the same seed, also with filters and penalties: the rows are bit-equal."""
    one = engine("bfloat16", True)
    ids = one.encode_chat([{"role": "user", "content": "Tell me a story about a lighthouse."}])
    sampling = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, seed=5)
    decoding = Decoding(80, sampling, Fixed())
    plain, dspark = (
        [t for r in one.generate(decoding.request(one, ids, mode, "0")) for t in r.committed]
        for mode in ("plain", "dspark")
    )
    assert plain == dspark
