"""Runs of visitors on one engine: a queue, one worker thread, and messages that every page reads at its own pace.

The worker only appends to a run's list. What a message takes to make, such as turning tokens into text, is put off
until somebody reads it, so that it costs decoding nothing.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from local_runner.options import Settings
from sglang_dspark.errors import CheckFailed, InputError
from ui.ask import Ask
from ui.messages import Message, State, state_message

KEPT_RUNS = 24
"""Finished runs whose messages stay readable, for exports and for pages that reconnect."""
MOST_WAITING = 24
"""Runs that may wait; who asks beyond that is told to come back."""
ABANDONED_S = 10.0
"""How long a run goes on while no page reads it."""

SWEEP_S = 1.0
"""How often runs are looked at for that."""

Later = Callable[[], list[Message]]
"""Makes messages when somebody reads them; called once."""


class Run:
    """One thing that a visitor asked for, and the messages that tell of it.

    `id` cannot be guessed: whoever knows it may read and cancel the run.
    """

    def __init__(self, ask: Ask) -> None:
        self.id = secrets.token_urlsafe(18)
        self.ask = ask
        self.cancelled = threading.Event()
        self.done = threading.Event()
        self._new: deque[Later | Message] = deque()
        self._messages: list[Message] = []
        self._reading = threading.Lock()
        self._readers = 0
        self._read_at = time.monotonic()

    def tell(self, what: Later | Message) -> None:
        """Append a message, or what makes messages once they are read."""
        self._new.append(what)

    def state(self, state: State, text: str = "", **more: Any) -> None:
        """Append a state message; `more` holds its lane, position or fraction."""
        self.tell(state_message(state, text=text, **more))

    def after(self, count: int = 0) -> list[Message]:
        """The messages after the first `count`."""
        with self._reading:
            while self._new:
                what = self._new.popleft()
                try:
                    self._messages += what() if callable(what) else [what]
                except InputError as error:
                    self._messages.append(state_message("error", text=str(error)))
            return self._messages[max(0, count) :]

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Within the block a page follows this run."""
        with self._reading:
            self._readers += 1
        try:
            yield
        finally:
            with self._reading:
                self._readers -= 1
                self._read_at = time.monotonic()

    @property
    def read_now(self) -> bool:
        """Whether a page follows this run."""
        return self._readers > 0

    @property
    def abandoned(self) -> bool:
        """Whether no page has followed this run for a while."""
        return not self.read_now and time.monotonic() - self._read_at > ABANDONED_S


class Source(Protocol):
    """Where rounds come from."""

    @property
    def name(self) -> str:
        """What is behind it, for people."""

    def run(self, run: Run) -> None:
        """Do what `run.ask` says and tell the run; return soon after `run.cancelled` is set.

        Called on one thread, one run at a time. Raises InputError for what cannot be done.
        """

    def machine(self) -> dict[str, Any]:
        """What is known about where it runs, from any thread and without waiting (see `ui.machine`)."""


class Service:
    """Lets one source do what many visitors ask, in the order in which they asked."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._runs: dict[str, Run] = {}
        self._waiting: deque[Run] = deque()
        self._change = threading.Condition()
        self._closed = threading.Event()
        self._current: Run | None = None
        self._threads = [
            threading.Thread(target=work, name=f"dspark-{work.__name__.strip('_')}", daemon=True)
            for work in (self._work, self._sweep)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, ask: Ask) -> Run:
        """Queue what a visitor asks for. Raises InputError when too many wait."""
        run = Run(ask)
        with self._change:
            if len(self._waiting) >= MOST_WAITING:
                raise InputError(f"{MOST_WAITING} runs are waiting already; try again in a while.")
            self._runs[run.id] = run
            self._waiting.append(run)
            if self._current is not None or len(self._waiting) > 1:
                run.state("queued", position=len(self._waiting))
            self._forget()
            self._change.notify()
        return run

    def keep(self, messages: list[Message], settings: Settings) -> Run:
        """A finished run that holds these messages, never forgotten: a recording."""
        run = Run(Ask("replay", settings))
        for message in messages:
            run.tell(message)
        run.done.set()
        self._runs[run.id] = run
        return run

    def find(self, id_: str) -> Run | None:
        """The run with this id, unless it has been forgotten."""
        return self._runs.get(id_)

    def cancel(self, run: Run) -> None:
        """Stop a run at its next round, or free its place in the queue."""
        run.cancelled.set()
        with self._change:
            if run in self._waiting:
                self._waiting.remove(run)
                self._end(run, "cancelled")
                self._tell_positions()

    def close(self) -> None:
        """Cancel everything and end the threads."""
        self._closed.set()
        with self._change:
            for run in self._runs.values():
                run.cancelled.set()
            self._waiting.clear()
            self._change.notify()
        for thread in self._threads:
            thread.join(timeout=5)

    def _work(self) -> None:
        while True:
            with self._change:
                self._current = None
                self._change.wait_for(lambda: self._waiting or self._closed.is_set())
                if self._closed.is_set():
                    return
                run = self._current = self._waiting.popleft()
                self._tell_positions()
            try:
                self.source.run(run)
                self._end(run, "cancelled" if run.cancelled.is_set() else "finished")
            except (InputError, CheckFailed) as error:
                self._end(run, "error", str(error))
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                what = type(error).__name__
                self._end(run, "error", f"Something went wrong inside ({what}); the terminal shows where.")

    def _sweep(self) -> None:
        """Cancel the runs whose pages are gone."""
        while not self._closed.wait(SWEEP_S):
            for run in list(self._runs.values()):
                if not run.done.is_set() and run.abandoned:
                    self.cancel(run)

    def _tell_positions(self) -> None:
        for position, run in enumerate(self._waiting, start=1):
            run.state("queued", position=position)

    def _end(self, run: Run, state: State, text: str = "") -> None:
        run.state(state, text)
        run.done.set()

    def _forget(self) -> None:
        """Drop the oldest finished runs beyond KEPT_RUNS that nobody reads."""
        finished = [r for r in self._runs.values() if r.done.is_set() and r.ask.kind != "replay" and not r.read_now]
        for run in finished[: max(0, len(finished) - KEPT_RUNS)]:
            del self._runs[run.id]
