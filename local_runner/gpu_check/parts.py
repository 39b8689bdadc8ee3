"""Runs the parts of a check one after the other; what one of them does wrong is no other's business."""

from __future__ import annotations

import contextlib
import gc
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import Any

import torch

Result = dict[str, Any]


class OutOfTime(BaseException):
    """A part took longer than it may. No Exception, so that no library takes it for an error that it can handle."""


class Skipped(Exception):
    """A part has nothing to work on; the message says what it would need."""


@dataclass(frozen=True, slots=True)
class Part:
    """`run` writes what it finds into a dict as it goes, and under `checks` which demands were met; it may take
    `seconds`.
    """

    name: str
    seconds: float
    run: Callable[[Result], None]


def run_parts(parts: Sequence[Part], seconds: float, store: Callable[[Result], None]) -> Result:
    """Run all parts within `seconds` altogether; return a record a part, and `store` what there is after each.

    A record holds what the part found, its `seconds` and its `status`: passed, failed (a check is not met), error,
    out of time, or skipped; with a `reason` for the last three.
    """
    began = perf_counter()
    records: Result = {}
    for part in parts:
        left = seconds - (perf_counter() - began)
        records[part.name] = run_part(part, min(part.seconds, left))
        store(records)
    return records


def run_part(part: Part, seconds: float) -> Result:
    """The record of one part (see `run_parts`)."""
    record: Result = {"status": "passed"}
    began = perf_counter()
    try:
        if seconds <= 0:
            raise OutOfTime("no time was left to begin")
        with time_limit(seconds):
            part.run(record)
        if not all(record.get("checks", {}).values()):
            record["status"] = "failed"
    except Skipped as skipped:
        record |= {"status": "skipped", "reason": str(skipped)}
    except OutOfTime as late:
        record |= {"status": "out of time", "reason": str(late)}
    except Exception as error:
        # Whatever it is, the parts after it can still say something, and a borrowed machine is not there twice.
        where = traceback.format_exception(error)[-6:]
        record |= {"status": "error", "reason": f"{type(error).__name__}: {error}", "traceback": "".join(where)}
    record["seconds"] = round(perf_counter() - began, 2)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return record


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after `seconds`, between two steps of Python; a call of the driver is not cut."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def succeeded(records: Result) -> bool:
    """Whether no part failed; a part that had nothing to work on has not."""
    return all(record["status"] in ("passed", "skipped") for record in records.values())
