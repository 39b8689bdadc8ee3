"""Timing that survives a machine whose speed drifts: alternatives take turns, and medians with quartiles are kept.

A sample is a function that does its work once, leaves everything as it found it, and returns the seconds that it took.
`interleaved` calls samples in turn, so that what a minute does to one it does to all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np
import torch

from local_runner.engines.base import Drafter, Request, Target
from local_runner.engines.loop import PREFILL_CHUNK, decode
from sglang_dspark.draft.model import DraftModel

Sample = Callable[[], float]
Key = TypeVar("Key", bound=Hashable)
Part = TypeVar("Part")

BUFFER_BYTES = 512 << 20
"""What a bandwidth sample reads on a CPU: many times the caches."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds: the median of `count` samples, their quartiles, and the least."""

    median: float
    low: float
    high: float
    best: float
    count: int


def spread(seconds: Collection[float]) -> Spread:
    """The spread of at least one sample."""
    ordered = sorted(seconds)
    low, _, high = quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Spread(median(ordered), low, high, ordered[0], len(ordered))


def interleaved(samples: Mapping[Key, Sample], repeats: int, warm_up: int = 1) -> dict[Key, Spread]:
    """Take every sample once a repeat, in turn, after `warm_up` repeats that do not count."""
    seconds: dict[Key, list[float]] = {key: [] for key in samples}
    for repeat in range(warm_up + repeats):
        for key, sample in samples.items():
            took = sample()
            if repeat >= warm_up:
                seconds[key].append(took)
    return {key: spread(taken) for key, taken in seconds.items()}


def waiting(device: torch.device) -> Callable[[], None]:
    """Waits until `device` has done what it was told; nothing to wait for on a CPU."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def timed(call: Callable[[], object], wait: Callable[[], None]) -> Sample:
    """A sample of `call`, which must leave everything as it found it."""

    def sample() -> float:
        wait()
        began = perf_counter()
        call()
        wait()
        return perf_counter() - began

    return sample


def fill(target: Target, context: int) -> None:
    """Start over with `context` made-up tokens in the cache."""
    target.reset()
    for start in range(0, context, PREFILL_CHUNK):
        target.forward(_tokens(target, min(PREFILL_CHUNK, context - start)), last_only=True)


def step_sample(target: Target, rows: int) -> Sample:
    """One forward of `rows` tokens after what the cache holds."""
    context, wait, tokens = target.length, waiting(target.device), _tokens(target, rows)
    forward = timed(lambda: target.forward(tokens), wait)

    def sample() -> float:
        seconds = forward()
        target.truncate(context)
        return seconds

    return sample


def draft_sample(draft: DraftModel, context: int, device: torch.device) -> Sample:
    """Drafting one block greedily after `context` observed rows, and observing one row: the least that a round needs.

    Features are random; no time depends on their values.
    """
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(context + 1, draft.config.feature_size, generator=generator).to(device)
    draft.reset()
    draft.observe(features[:context], 0)

    def work() -> None:
        draft.draft(1, context)
        draft.observe(features[context:], context)

    round_ = timed(work, waiting(device))

    def sample() -> float:
        seconds = round_()
        draft.crop(context)
        return seconds

    return sample


def read_samples(device: torch.device, size: int = BUFFER_BYTES) -> dict[str, Sample]:
    """Ways to read `size` bytes of the memory of `device` once; the quickest shows the bandwidth that there is.

    The CPU's are PyTorch's sum, on its threads, and NumPy's dot product, on those of its BLAS (usually all cores).
    """
    buffer = torch.ones(size // 4, device=device)
    ways: dict[str, Callable[[], object]] = {"torch.sum": buffer.sum, "torch.dot": lambda: torch.dot(buffer, buffer)}
    if device.type == "cpu":
        array = buffer.numpy()
        ways["numpy.dot"] = lambda: np.dot(array, array)
    wait = waiting(device)
    return {name: timed(call, wait) for name, call in ways.items()}


def bandwidth(spreads: Mapping[str, Spread], size: int = BUFFER_BYTES) -> tuple[float, str]:
    """Bytes per second of the quickest of all samples of `read_samples(…, size)`, and the name of that way."""
    name = min(spreads, key=lambda way: spreads[way].best)
    return size / spreads[name].best, name


def parameters_read(sizes: Mapping[str, int]) -> int:
    """How many parameters a step reads, of a model whose tensors have these names and numbers of elements.

    All layers and lm_head once. The embedding is looked up by row, which is nothing, but a model without a lm_head of
    its own multiplies with it.
    """
    tied = "lm_head.weight" not in sizes
    return sum(count for name, count in sizes.items() if tied or not name.endswith("embed_tokens.weight"))


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the seconds of `rounds` decoding rounds went: the target's forwards, the draft (blocks and observing), and
    the rest, which is choosing tokens, bookkeeping and events.
    """

    rounds: int
    seconds: float
    target_s: float
    draft_s: float

    @property
    def overhead(self) -> float:
        """The rest's share of the whole, 0 to 1."""
        return 1 - (self.target_s + self.draft_s) / self.seconds


def round_shares(target: Target, drafter: Drafter | None, requests: Iterable[Request]) -> Shares:
    """Decode `requests` and see where the time of their rounds goes; the prefill is left out."""
    wait = waiting(target.device)
    of_target, of_draft = _Clock(wait), _Clock(wait)
    watched_target = _watched(target, ("forward",), of_target)
    watched_drafter = None if drafter is None else _watched(drafter, ("draft", "observe"), of_draft)
    rounds, seconds, target_s, draft_s = 0, 0.0, 0.0, 0.0
    for request in requests:
        stream = decode(watched_target, watched_drafter, request)
        next(stream)
        of_target.seconds = of_draft.seconds = 0.0
        began = perf_counter()
        rounds += sum(1 for _ in stream)
        wait()
        seconds += perf_counter() - began
        target_s, draft_s = target_s + of_target.seconds, draft_s + of_draft.seconds
    return Shares(rounds, seconds, target_s, draft_s)


class _Clock:
    """Adds up the seconds of calls."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds = 0.0
        self._wait = wait

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            result = call(*args, **kwargs)
            # A device works on after the call returns, and its time belongs to whoever asked for it.
            self._wait()
            self.seconds += perf_counter() - began
            return result

        return timed_call


class _Watched:
    """Passes everything on to `inner`; calls of the named methods run on a clock."""

    def __init__(self, inner: object, names: Iterable[str], clock: _Clock) -> None:
        self._inner = inner
        for name in names:
            setattr(self, name, clock.around(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _watched(inner: Part, names: Iterable[str], clock: _Clock) -> Part:
    return cast(Part, _Watched(inner, names, clock))


def _tokens(target: Target, count: int) -> list[int]:
    """Different tokens, so that the embedding is read as in real text."""
    return [(1 + 7919 * i) % target.vocab_size for i in range(count)]
