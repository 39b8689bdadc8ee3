"""Measuring what rounds cost: by decoding, in the seconds that Rounds report, so that nothing of them is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from local_runner.engines.base import Choose, Draft, Drafter, Request
from local_runner.engines.lookup import BLOCK
from local_runner.engines.loop import PREFILL_CHUNK
from local_runner.engines.torch.engine import TorchEngine
from local_runner.measure import step_sample
from local_runner.runner.drafter import Mixed
from local_runner.runner.profile import Profile
from sglang_dspark.decoding.adaptive import Source
from sglang_dspark.decoding.rounds import Round, decode_rounds
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.errors import InputError

BUDGET_S = 20.0
PASSES = 12
PLAIN_ROUNDS = 8
PAIRS = 4
LONGEST_PROMPT = PREFILL_CHUNK - 1
"""A head takes such a prompt in at once, with its first block."""


def measure(
    engine: TorchEngine,
    prompt: Sequence[int],
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Decode `prompt` again and again, plainly and with every length of prefix, for at most about `budget_s` seconds.

    All kinds of round take turns, and the lower quartile of each counts: what else runs on the machine only adds time.
    When the budget is spent, only what a curve cannot do without is measured still: plain rounds, one row, all of them.
    Raises InputError where the context has no room for that.
    """
    block, room = engine.block or BLOCK, engine.target.context_length
    prompt = tuple(prompt)[: max(1, min(LONGEST_PROMPT, room // 2))]
    if len(prompt) + 2 * (block + 1) > room:
        raise InputError(f"A context of {room} tokens is too short to schedule blocks; raise --context-length.")
    began = clock()
    samples: dict[str, list[float]] = {}
    tried, survived = [0] * block, [0] * block

    def note(kind: str, seconds: float) -> None:
        samples.setdefault(kind, []).append(seconds)

    def spent(*needed: str) -> bool:
        return clock() - began > budget_s and samples.keys() >= set(needed)

    for number in range(PASSES):
        if number and spent():
            break
        if number == 1 and clock() - began < budget_s / 4:
            samples.clear()  # the first pass was also a warm-up
        for round_ in decode_rounds(engine.generate(Request(prompt, 1 + PLAIN_ROUNDS, SamplingParams()))):
            note("plain", round_.draft_s + round_.verify_s)
            if spent("plain"):
                break
        for tapped, untapped in islice(_forwards(engine), PAIRS):
            note("forward", untapped)
            note("taps", tapped - untapped)
            if spent("taps"):
                break
        for index, round_ in enumerate(_blocks(engine, prompt, block)):
            note("draft" if index else "first draft", round_.draft_s)
            note(str(round_.scheduled + 1), round_.verify_s)
            for k in range(min(round_.scheduled, round_.accepted + 1)):
                tried[k] += 1
                survived[k] += round_.accepted > k
            if spent("1", str(block + 1)):
                break
    least = {kind: sorted(seconds)[len(seconds) // 4] for kind, seconds in samples.items()}
    rows = sorted(int(kind) for kind in least if kind.isdigit())
    head = engine.drafter is not None
    # What keeping features costs is a hundredth of a round or so: taken from forwards side by side, and from many rows.
    following = max(0.0, least["first draft"] - least["draft"]) / len(prompt) + max(0.0, least["taps"])
    return Profile(
        plain_s=least["plain"],
        parked_s=least["plain"] + (following if head else 0.0),
        rows=tuple(rows),
        seconds=tuple(least[str(r)] for r in rows),
        draft_s=least["draft"] if head else 0.0,
        overhead_s=max(0.0, least["plain"] - least["forward"]),
        tried=tuple(tried) if head else (),
        survived=tuple(survived) if head else (),
    )


def _forwards(engine: TorchEngine) -> Iterator[tuple[float, float]]:
    """Seconds of one row with the features that the head reads, and without, time and again."""
    target = engine.target
    taps = target.taps
    target.truncate(min(target.length, target.context_length - 1))
    while True:
        tapped = step_sample(target, 1)()
        target.taps = ()
        untapped = step_sample(target, 1)()
        target.taps = taps
        yield tapped, untapped


def _blocks(engine: TorchEngine, prompt: tuple[int, ...], block: int) -> Iterator[Round]:
    """Rounds that verify prefixes of every length; what is needed most comes first."""
    lengths = [0, block, 0, *range(1, block)]
    head = engine.drafter
    mixed = Mixed(_Script(lengths), head or _Guesses(block), block, None)
    mixed.begin(prompt, room=engine.target.context_length, lookup=False, following=True)
    engine.drafter = mixed
    try:
        request = Request(prompt, 2 + sum(k + 1 for k in lengths), SamplingParams(), schedule=mixed)
        yield from islice(engine.generate(request), 1, 1 + len(lengths))
    finally:
        engine.drafter = head


class _Script:
    """A `Chooser` that always drafts, and verifies as much as it was told."""

    following = True

    def __init__(self, lengths: Iterable[int]) -> None:
        self._lengths = iter(lengths)

    def choose(self, matches: Sequence[int]) -> Source:
        return "head"

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        return next(self._lengths, 0)

    def observe(self, scheduled: int, accepted: int) -> None:
        pass

    def compared(self, matches: Sequence[int], right: int) -> None:
        pass


class _Guesses(Drafter):
    """Drafts the anchor over and over, which costs nothing."""

    def __init__(self, block: int) -> None:
        self._block = block

    @property
    def block(self) -> int:
        return self._block

    def reset(self) -> None:
        pass

    def observe(self, count: int) -> None:
        pass

    def draft(self, anchor: int, position: int, choose: Choose | None = None) -> Draft:
        return Draft([anchor] * self._block)
