"""Stops decoding at the next round when the host runs short of memory, long before the host suffers.

Where processor and graphics share memory, no control group sees what the device allocates, and giving out too much can
hang the host instead of raising an error: so the host's own available memory, its memory pressure and its swap are
watched, against the thresholds of the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from local_runner.machine import Pool
from local_runner.machine.memory import ROOT, memory, pressure
from local_runner.placement.plan import Thresholds, reserve
from sglang_dspark.errors import CheckFailed

EVERY_S = 0.25


def watching(description: Mapping[str, Any], cancelled: threading.Event) -> Watchdog:
    """A watchdog with the thresholds of the plan in an engine's description, or those of any plan for this host's
    memory where there is none.
    """
    if planned := description.get("plan"):
        return Watchdog(Thresholds(**planned["thresholds"]), cancelled)
    total = memory().total
    return Watchdog(Thresholds(reserve(Pool("system", "system", total, total, 1.0, "")) // 2), cancelled)


class Watchdog:
    """Sets `cancelled` when a threshold is crossed; `reason` then says which, in one sentence.

    Use it as a context around decoding. `check` takes one sample, which its thread does every `every_s` seconds. `root`
    is where /proc and /sys are.
    """

    def __init__(
        self, thresholds: Thresholds, cancelled: threading.Event, *, root: Path = ROOT, every_s: float = EVERY_S
    ) -> None:
        self.thresholds, self.cancelled, self.reason = thresholds, cancelled, ""
        self._root, self._every_s = root, every_s
        self._swap_before = memory(root).swap_used
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def raise_trouble(self) -> None:
        """Raise CheckFailed with the reason, if there is one."""
        if self.reason:
            raise CheckFailed(self.reason)

    def check(self) -> bool:
        """Whether all is well. The first time that it is not, `reason` is set and then `cancelled`."""
        if not self.reason and (why := self._trouble()):
            self.reason = (
                f"Stopped: {why}. Close other programs, or plan for less with a shorter context or fewer users"
                " (dspark plan)."
            )
            self.cancelled.set()
        return not self.reason

    def _trouble(self) -> str:
        limits, now, felt = self.thresholds, memory(self._root), pressure(self._root)
        grown = now.swap_used - self._swap_before
        if now.available < limits.available:
            return f"{now.available >> 20} MiB of memory are left, below the {limits.available >> 20} MiB kept free"
        if felt is not None and felt.full > limits.pressure_full:
            return f"all tasks waited for memory {felt.full:.0f} % of the last ten seconds"
        if felt is not None and felt.some > limits.pressure_some:
            return f"tasks waited for memory {felt.some:.0f} % of the last ten seconds"
        if grown > limits.swap_growth:
            return f"{grown >> 20} MiB went to swap since decoding began"
        return ""

    def _watch(self) -> None:
        while self.check() and not self._ended.wait(self._every_s):
            pass
