"""Measuring: turns, medians, what is restored after a sample, and whose time is whose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from local_runner import measure
from local_runner.engines.base import Choose, Draft, Request
from local_runner.measure import Sample, bandwidth, fill, interleaved, parameters_read, read_samples, spread
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

CPU = torch.device("cpu")


class Now:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class SlowTarget:
    """Always says token 1. A forward takes 8 s, taking tokens back 0.5 s."""

    vocab_size, context_length, device = 4, 1000, CPU

    def __init__(self, now: Now) -> None:
        self.now, self.length = now, 0
        self.forwards: list[int] = []

    def reset(self) -> None:
        self.length = 0

    def truncate(self, length: int) -> None:
        self.now.seconds += 0.5
        self.length = length

    def forward(self, tokens: Sequence[int], last_only: bool = False) -> torch.Tensor:
        self.now.seconds += 8
        self.forwards.append(len(tokens))
        self.length += len(tokens)
        return torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1 if last_only else len(tokens), 4)


class SlowDrafter:
    """Drafts two tokens of which the first is right. A block takes 1 s, observing 0.5 s."""

    block = 2

    def __init__(self, now: Now) -> None:
        self.now = now

    def reset(self) -> None:
        pass

    def observe(self, count: int) -> None:
        self.now.seconds += 0.5

    def draft(self, anchor: int, position: int, choose: Choose | None = None) -> Draft:
        self.now.seconds += 1
        return Draft([1, 2])


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    clock = Now()
    monkeypatch.setattr(measure, "perf_counter", clock)
    return clock


def test_samples_take_turns_and_warm_ups_do_not_count() -> None:
    order: list[str] = []

    def sample(name: str, seconds: list[float]) -> Sample:
        def take() -> float:
            order.append(name)
            return seconds.pop(0)

        return take

    taken = interleaved({"a": sample("a", [99, 3, 1, 2]), "b": sample("b", [99, 6, 6, 9])}, 3)
    assert order == ["a", "b"] * 4
    assert (taken["a"].median, taken["a"].low, taken["a"].high, taken["a"].best) == (2, 1.5, 2.5, 1)
    assert (taken["b"].median, taken["b"].count) == (6, 3)


def test_a_single_sample_is_its_own_quartiles() -> None:
    assert spread([4.0]) == measure.Spread(4.0, 4.0, 4.0, 4.0, 1)


def test_a_step_is_timed_alone_and_leaves_the_cache_as_it_was(now: Now) -> None:
    target = SlowTarget(now)
    fill(target, 300)
    assert target.forwards == [256, 44] and target.length == 300
    sample = measure.step_sample(target, 5)
    assert [sample(), sample()] == [8, 8]
    assert target.forwards[2:] == [5, 5] and target.length == 300


def test_filling_starts_over(now: Now) -> None:
    target = SlowTarget(now)
    fill(target, 20)
    fill(target, 10)
    assert target.length == 10


def test_a_round_is_split_into_target_draft_and_the_rest(now: Now) -> None:
    request = Request((3, 3), 6, SamplingParams(), schedule=Fixed())
    shares = measure.round_shares(SlowTarget(now), SlowDrafter(now), [request, request])
    # After the prefill's token each round commits two: three rounds for five tokens.
    assert (shares.rounds, shares.seconds) == (6, 6 * 10.0)
    assert (shares.target_s, shares.draft_s) == (6 * 8.0, 6 * 1.5)
    assert shares.overhead == pytest.approx(0.5 / 10)


def test_plain_rounds_have_no_draft(now: Now) -> None:
    shares = measure.round_shares(SlowTarget(now), None, [Request((3,), 4, SamplingParams())])
    assert (shares.rounds, shares.draft_s, shares.overhead) == (3, 0.0, pytest.approx(0.5 / 8.5))


def test_the_quickest_way_to_read_is_the_bandwidth() -> None:
    spreads = {"slow": spread([4.0, 3.0]), "quick": spread([9.0, 2.0])}
    assert bandwidth(spreads, 100) == (50.0, "quick")


def test_reading_twice_as_much_takes_longer() -> None:
    small, large = (interleaved(read_samples(CPU, size), 5) for size in (1 << 20, 64 << 20))
    assert set(small) == {"torch.sum", "torch.dot", "numpy.dot"}
    assert all(large[way].best > 2 * small[way].best for way in small)


def test_a_step_reads_lm_head_once_and_of_the_embedding_only_rows() -> None:
    layer = {"model.layers.0.mlp.down_proj.weight": 70, "model.norm.weight": 2}
    embedding = {"model.embed_tokens.weight": 1000}
    assert parameters_read(layer | embedding) == 1072
    assert parameters_read(layer | embedding | {"lm_head.weight": 1000}) == 1072
