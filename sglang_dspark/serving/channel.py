"""Rounds on their way from the processes that run the model to the one that answers HTTP: ZeroMQ over sockets in a
folder that only this user can enter. The model never waits for it: what does not fit is dropped and counted.

A listener subscribes by request or to all. It may come late: the rounds of its request that are still kept come first.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from sglang_dspark.decoding.rounds import Round

FOLDER = "DSPARK_ROUNDS"
"""The environment variable by which processes learn of the folder."""
KEPT = 4096
"""Rounds that are kept for late listeners, and that may wait for slow ones."""
ALL = b"round "
SNAPSHOT_S = 5.0


def topic(request: str | None) -> bytes:
    """What a round of `request` is sent under; the beginning of all topics for None."""
    return ALL if request is None else ALL + request.encode() + b"\0"


def addresses(folder: Path, rank: int) -> tuple[str, str]:
    """Where the process of a data-parallel `rank` publishes rounds, and where it answers for its counts."""
    return f"ipc://{folder / f'rounds-{rank}'}", f"ipc://{folder / f'counts-{rank}'}"


class Publisher:
    """Sends rounds from a thread of its own to whoever listens. `counts` answers for a snapshot; `often` is called
    about once a second.
    """

    def __init__(
        self, folder: Path, rank: int, counts: Callable[[], dict[str, Any]], often: Callable[[], None] | None = None
    ) -> None:
        self.dropped = 0
        self._kept: deque[Round] = deque(maxlen=KEPT)
        self._waiting: queue.Queue[Round] = queue.Queue(KEPT)
        self._topics: dict[bytes, int] = {}
        self._counts, self._often = counts, often
        self._where = addresses(folder, rank)
        self._thread = threading.Thread(target=self._run, name="dspark-rounds", daemon=True)
        self._thread.start()

    def put(self, round_: Round) -> None:
        """Keep a round, and have it sent if somebody listens for it. Never waits."""
        self._kept.append(round_)
        if self._topics and (ALL in self._topics or topic(round_.request) in self._topics):
            try:
                self._waiting.put_nowait(round_)
            except queue.Full:
                self.dropped += 1

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.XPUB) as rounds, context.socket(zmq.REP) as counts:
            rounds.setsockopt(zmq.XPUB_VERBOSER, 1)
            rounds.setsockopt(zmq.SNDHWM, KEPT)
            rounds.bind(self._where[0])
            counts.bind(self._where[1])
            poller = zmq.Poller()
            poller.register(rounds, zmq.POLLIN)
            poller.register(counts, zmq.POLLIN)
            told = 0.0
            while True:
                ready = dict(poller.poll(5 if self._topics else 1000))
                while not self._waiting.empty():
                    _send(rounds, self._waiting.get_nowait())
                if rounds in ready:
                    self._subscription(rounds)
                if counts in ready:
                    counts.recv()
                    counts.send_json(self._counts() | {"dropped": self.dropped})
                if self._often is not None and time.monotonic() - told > 1:
                    self._often()
                    told = time.monotonic()

    def _subscription(self, rounds: zmq.Socket[bytes]) -> None:
        """Note who listens for what, and begin with what is kept of one request's rounds."""
        message = rounds.recv()
        wanted, more = message[1:], message[0] == 1
        count = self._topics.get(wanted, 0) + (1 if more else -1)
        self._topics[wanted] = count
        if count <= 0:
            del self._topics[wanted]
        if more and wanted != ALL:
            for round_ in [r for r in self._kept.copy() if topic(r.request) == wanted]:
                _send(rounds, round_)


def _send(socket: zmq.Socket[bytes], round_: Round) -> None:
    # A listener that has too many waiting is passed over; it sees the gap in the indices.
    socket.send_multipart([topic(round_.request), round_.to_json().encode()])


async def listen(folder: Path, ranks: int, request: str | None) -> AsyncIterator[bytes | None]:
    """Rounds as JSON as they come, those of one request or of all; None when there was none for a while."""
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVHWM, KEPT)
        socket.setsockopt(zmq.LINGER, 0)
        for rank in range(ranks):
            socket.connect(addresses(folder, rank)[0])
        socket.setsockopt(zmq.SUBSCRIBE, topic(request))
        while True:
            if await socket.poll(1000):
                yield (await socket.recv_multipart())[1]
            else:
                yield None


async def counts(folder: Path, rank: int) -> dict[str, Any]:
    """What the process of a rank has counted. Raises TimeoutError if it does not answer."""
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(addresses(folder, rank)[1])
        await socket.send(b"")
        if not await socket.poll(int(SNAPSHOT_S * 1000)):
            raise TimeoutError
        found: dict[str, Any] = await socket.recv_json()
        return found


def folder() -> Path | None:
    """The folder of this server's sockets, if it has one."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else None
