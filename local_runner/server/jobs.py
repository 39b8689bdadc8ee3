"""One engine, one thread, one request after the other in the order in which they came."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from local_runner.answer import Answer, CertainText
from local_runner.engine import Decoding, Engine, encode, text_stream
from local_runner.server.feed import Feed
from local_runner.server.protocol import Ask, Prompt, Served
from local_runner.server.refusal import Refused
from local_runner.server.totals import Totals
from local_runner.watchdog import Watchdog, watching
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError

MOST_WAITING = 64
LAST_ROUNDS = 32
"""Rounds that a snapshot shows."""
STOP_S = 10.0
"""How long to wait for the round that is being decoded when the server stops."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Said:
    """A round of an answer, and the text that became certain with it."""

    choice: int
    text: str
    round: Round


@dataclass(frozen=True, slots=True)
class Ended:
    """An answer that is over; `rest` is the end of its text that was held back until then."""

    choice: int
    answer: Answer
    rest: str


class Job:
    """A request on its way. Made on the event loop that awaits its events."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.cancelled = threading.Event()
        self.came = time.monotonic()
        self.began: float | None = None
        self.rounds = self.tokens = 0
        self.dog: Watchdog | None = None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Said | Ended | Refused | None] = asyncio.Queue()
        self._first: Said | Ended | Refused | None = None

    def tell(self, what: Said | Ended | Refused | None) -> None:
        """Hand an event to the event loop, from any thread; None is the last one."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, what)

    async def started(self) -> None:
        """Wait for the first event. Raises Refused if it is that."""
        self._first = await self._events.get()
        if isinstance(self._first, Refused):
            raise self._first

    async def events(self) -> AsyncIterator[Said | Ended]:
        """What happens, until it is over. Raises Refused where that is what happened."""
        first, self._first = self._first, None
        while (what := first or await self._events.get()) is not None:
            first = None
            if isinstance(what, Refused):
                raise what
            yield what

    @property
    def cut_short(self) -> str | None:
        """Why its answers end before their time, where the host ran short of memory."""
        return (self.dog.reason or None) if self.dog else None

    @property
    def queued_s(self) -> float:
        """Seconds between the request and the first of its work."""
        return (self.began or time.monotonic()) - self.came


class Jobs:
    """The queue and the thread that works it off, within a `with` block.

    Everything that touches the engine happens on that thread, so an engine needs no locks.
    """

    def __init__(self, served: Served, *, most_waiting: int = MOST_WAITING) -> None:
        self.served, self.most_waiting = served, most_waiting
        self.feed = Feed()
        self.stopping = False
        self.totals = Totals()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._seconds: deque[float] = deque(maxlen=8)
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)

    def __enter__(self) -> Jobs:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(STOP_S)

    def add(self, ask: Ask) -> Job:
        """Queue a request. Raises Refused if it cannot wait here."""
        job = Job(ask)
        with self._change:
            if self.stopping:
                raise _closing()
            if len(self._waiting) >= self.most_waiting:
                self.totals.turned_away += 1
                usual = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
                raise Refused(
                    f"{len(self._waiting)} requests wait already; try again later.",
                    status=429,
                    code="queue_full",
                    headers={"Retry-After": str(min(60, max(1, math.ceil(usual))))},
                )
            if any(j.ask.id == ask.id for j in (*self._waiting, self._running) if j is not None):
                raise Refused(f"A request with the rid '{ask.id}' is under way; choose another.", "rid")
            self.feed.begin(ask.id)
            self.totals.requests += 1
            self._waiting.append(job)
            self._change.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Free a request's place in the queue, or end it at the next round; nothing, if it is over."""
        job.cancelled.set()
        with self._change:
            if job in self._waiting:
                self._waiting.remove(job)
                self.totals.cancelled += 1
                self._over(job)

    def stop(self) -> None:
        """Take no more requests, turn away those that wait, and end the one that runs at its next round."""
        with self._change:
            self.stopping = True
            while self._waiting:
                job = self._waiting.popleft()
                job.tell(_closing())
                self._over(job)
            if self._running is not None:
                self._running.cancelled.set()
            self._change.notify()
        self.feed.closed = True

    def snapshot(self) -> dict[str, Any]:
        """What goes on: the queue, the running request, totals and the last rounds."""
        now = time.monotonic()
        with self._change:
            waiting, running = list(self._waiting), self._running
        return {
            "model": self.served.name,
            "engine": self.served.engine.description,
            "queue": [{"id": j.ask.id, "waiting_s": now - j.came} for j in waiting],
            "running": running
            and {
                "id": running.ask.id,
                "mode": running.ask.mode,
                "rounds": running.rounds,
                "tokens": running.tokens,
                "seconds": now - (running.began or now),
            },
            "totals": self.totals.to_dict(),
            "last_rounds": [asdict(e.round) for e in self.feed.after(max(0, self.feed.count - LAST_ROUNDS))],
        }

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                with watching(self.served.engine.description, job.cancelled) as job.dog:
                    if not job.dog.check():
                        raise Refused(job.dog.reason, status=503, code="out_of_memory")
                    stops = self._decode(job)
                cancelled, failed = "cancelled" in stops, False
            except Refused as refused:
                cancelled, failed = False, True
                job.tell(refused)
            except InputError as error:
                param = "logit_bias" if str(error).startswith("logit_bias") else job.ask.prompt_param
                cancelled, failed = False, True
                job.tell(Refused(str(error), param))
            except Exception:
                log.exception("The request %s failed.", job.ask.id)
                cancelled, failed = False, True
                job.tell(Refused("The engine failed; the server's log says why.", status=500))
            with self._change:
                self._running = None
                self._seconds.append(time.monotonic() - (job.began or job.came))
                self.totals.cancelled += cancelled
                self.totals.failed += failed
                self.totals.answered += not (cancelled or failed)
                self._over(job)

    def _next(self) -> Job | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self.stopping)
            if self.stopping:
                return None
            self._running = job = self._waiting.popleft()
            job.began = time.monotonic()
            return job

    def _over(self, job: Job) -> None:
        self.feed.end(job.ask.id, job.rounds)
        job.tell(None)

    def _decode(self, job: Job) -> list[str]:
        """Give all answers; return why each stopped."""
        ask, stops = job.ask, []
        for number, prompt in enumerate(ask.prompts):
            ids = _ids(self.served.engine, prompt)
            self.totals.prompt_tokens += len(ids)
            for n in range(ask.choices):
                stops.append(self._answer(job, number * ask.choices + n, ids, ask.seeded(n)).stop)
        return stops

    def _answer(self, job: Job, choice: int, ids: Sequence[int], decoding: Decoding) -> Answer:
        ask, engine = job.ask, self.served.engine
        if ask.mode == "dspark":
            decoding = decoding.measured(engine)
        name = f"{ask.id}/{choice}" if ask.choices * len(ask.prompts) > 1 else ask.id
        stream, certain = text_stream(engine), CertainText(decoding.stop_strings)
        rounds: list[Round] = []
        pieces: list[str] = []
        for round_ in engine.generate(decoding.request(engine, ids, ask.mode, name), job.cancelled):
            self.feed.append(ask.id, job.rounds, round_)
            self.totals.add(round_)
            rounds.append(round_)
            job.rounds += 1
            job.tokens += len(round_.committed)
            pieces.append(certain.push(stream.push(round_.committed)))
            job.tell(Said(choice, pieces[-1], round_))
        rest = certain.finish()
        answer = Answer("".join([*pieces, rest]), len(ids), tuple(rounds))
        job.tell(Ended(choice, answer, rest))
        return answer


def _ids(engine: Engine, prompt: Prompt) -> Sequence[int]:
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise InputError("The target has no tokenizer, so it cannot read text; give the prompt as token ids.")
        return list(engine.tokenizer(prompt)["input_ids"])
    if prompt and isinstance(prompt[0], int):
        return [token for token in prompt if isinstance(token, int)]
    return encode(engine, [message for message in prompt if isinstance(message, dict)])


def _closing() -> Refused:
    return Refused("The server is stopping.", status=503, code="stopping")
