"""The last rounds of all requests, for whoever watches: one ring that decoding writes and watchers read as they can."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice

from sglang_dspark.decoding.rounds import Round

KEPT_ROUNDS = 4096
KEPT_ENDS = 1024
PERIOD_S = 0.02
"""How often a watcher looks for new rounds."""
HEARTBEAT_S = 15.0
"""How long a stream of events is silent before it says that it is still there."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The `number`-th round of the server, which is the `nth` of the request `job`; both count from 0."""

    number: int
    nth: int
    job: str
    round: Round


class Feed:
    """Keeps the last `size` rounds. Writing never waits for a watcher: one that is slow misses the oldest rounds."""

    def __init__(self, size: int = KEPT_ROUNDS) -> None:
        self.count = 0
        """Rounds that there have been."""
        self.closed = False
        self._entries: deque[Entry] = deque(maxlen=size)
        self._ends: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def append(self, job: str, nth: int, round_: Round) -> None:
        """Take in the `nth` round of a request."""
        with self._lock:
            self._entries.append(Entry(self.count, nth, job, round_))
            self.count += 1

    def begin(self, job: str) -> None:
        """A request of this name comes; one of the same name may have ended before."""
        with self._lock:
            self._ends.pop(job, None)

    def end(self, job: str, rounds: int) -> None:
        """The request is over after so many rounds."""
        with self._lock:
            self._ends[job] = rounds
            if len(self._ends) > KEPT_ENDS:
                self._ends.popitem(last=False)

    def ended(self, job: str) -> int | None:
        """How many rounds a request had that is over, or None."""
        return self._ends.get(job)

    def after(self, number: int) -> list[Entry]:
        """What is kept of the rounds from `number` on."""
        with self._lock:
            fresh = max(0, min(self.count - number, len(self._entries)))
            return list(islice(self._entries, len(self._entries) - fresh, None))


def event(data: str, name: str = "") -> str:
    """A server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {data}\n\n"


async def follow(feed: Feed, job: str | None) -> AsyncIterator[str]:
    """The rounds as server-sent events: those of all requests from now on, or all those of one.

    One request's stream may be opened before the request comes; it closes with the event `end`. Rounds that were gone
    before they could be sent are counted in an event `dropped`, `{"rounds": n}`.
    """
    number = expected = feed.count if job is None else 0
    if job is not None:
        expected = 0
    told = time.monotonic()
    while True:
        over = feed.closed
        total = None if job is None else feed.ended(job)
        for entry in feed.after(number):
            number = entry.number + 1
            if job not in (None, entry.job):
                continue
            at = entry.number if job is None else entry.nth
            if at > expected:
                yield dropped(at - expected)
            expected = at + 1
            told = time.monotonic()
            yield event(entry.round.to_json())
        if total is not None and total > expected:
            yield dropped(total - expected)
        if over or total is not None:
            yield event("{}", "end")
            return
        if time.monotonic() - told > HEARTBEAT_S:
            told = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(PERIOD_S)


def dropped(rounds: int) -> str:
    """The event that says how many rounds a watcher missed."""
    return event(json.dumps({"rounds": rounds}), "dropped")
