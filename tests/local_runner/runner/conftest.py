"""An engine of tables in simulated time, and the tiny models of the engines' own tests."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from local_runner import measure
from local_runner.engines import loop
from local_runner.engines.base import Draft, Request
from sglang_dspark.decoding.rounds import Round

_spec = importlib.util.spec_from_file_location("engines_kit", Path(__file__).parents[1] / "engines" / "conftest.py")
assert _spec is not None and _spec.loader is not None
kit = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = kit  # where its dataclasses look for their types
_spec.loader.exec_module(kit)
golden, load, naive, one_thread = kit.golden, kit.load, kit.naive, kit.one_thread


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Target(kit.TableTarget):  # type: ignore[misc, name-defined]
    """A table whose forwards take `seconds[rows - 1]`, and `tap_s` more while it is tapped."""

    def __init__(self, table: torch.Tensor, clock: Clock, seconds: Sequence[float], tap_s: float, context: int) -> None:
        super().__init__(table, context)
        self.clock, self.seconds, self.tap_s = clock, seconds, tap_s
        self.taps: tuple[int, ...] = ()

    def forward(self, tokens: Sequence[int], last_only: bool = False) -> torch.Tensor:
        self.clock.now += self.seconds[min(len(tokens), len(self.seconds)) - 1] + self.tap_s * bool(self.taps)
        logits: torch.Tensor = super().forward(tokens, last_only)
        return logits


class Drafter(kit.TableDrafter):  # type: ignore[misc, name-defined]
    """A table whose blocks take `draft_s`."""

    draft_s = 0.0

    def draft(self, anchor: int, position: int, choose: Any = None) -> Draft:
        self.target.clock.now += self.draft_s
        block: Draft = super().draft(anchor, position, choose)
        return block


class Engine:
    """As much of an engine as the runner asks for."""

    tokenizer = None
    stop_ids: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ("a note",)

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        self.block = 0 if drafter is None else drafter.block
        self.has_confidence = drafter is not None and drafter.confidence is not None
        self.description: dict[str, Any] = {"engine": "tables", "draft": None if drafter is None else "table"}
        target.taps = () if drafter is None else (0,)

    def generate(self, request: Request, cancelled: threading.Event | None = None) -> Iterator[Round]:
        taps = self.target.taps
        try:
            if request.schedule is None:
                self.target.taps = ()
            yield from loop.decode(self.target, self.drafter, request, None, cancelled)
        finally:
            self.target.taps = taps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that rounds and samples of forwards are measured in."""
    clock = Clock()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(measure, "perf_counter", clock)
    return clock


SECONDS = (1.0, 1.08, 1.13, 1.18, 1.22)


@pytest.fixture
def engines(clock: Clock) -> Callable[..., Any]:
    """engines(vocab, good, head, …): an engine in simulated time.

    Its head is right about half of the time, always where it is `good`, and never where it is not.
    """

    def make(
        *,
        vocab: int = 6,
        block: int = 4,
        good: bool | None = None,
        head: bool = True,
        confident: bool = True,
        seconds: Sequence[float] = SECONDS,
        draft_s: float = 0.5,
        tap_s: float = 0.002,
        context: int = 1 << 20,
    ) -> Engine:
        numbers = torch.Generator().manual_seed(11)
        table = torch.randn(vocab, vocab, vocab, generator=numbers)
        if good is not None:
            table = torch.randn(vocab, vocab, generator=numbers).expand(vocab, vocab, vocab)
        drafts = table.mean(0) * 1.5 + torch.randn(block, vocab, vocab, vocab, generator=numbers) * 0.5
        if good is not None:
            sign = 1.0 if good else -1.0
            drafts = sign * table[0].expand(block, vocab, vocab, vocab)
        confidence = torch.sigmoid(torch.randn(block, vocab, vocab, generator=numbers)) if confident else None
        target = Target(table * 1.2, clock, seconds, tap_s, context)
        drafter = Drafter(target, drafts, confidence)
        drafter.draft_s = draft_s
        return Engine(target, drafter if head else None)

    return make
