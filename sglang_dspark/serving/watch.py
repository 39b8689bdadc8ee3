"""`/dspark/rounds` and `/dspark/snapshot` on SGLang's own HTTP port, behind its API key if it has one.

The stream is of server-sent events. Data are Rounds as JSON; an event `dropped` has the number of rounds that were lost
to this listener, and `end` follows the last round of the one request that was asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sglang_dspark import __version__
from sglang_dspark.serving import channel

MOST = 64
"""Listeners at once."""


class Watch:
    """What the process that answers HTTP knows: who listens, and what was lost to them."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.listeners = self.dropped = 0

    async def events(self, request: str | None) -> AsyncIterator[str]:
        """The stream as text, of one request or of all. Ends with the request, otherwise when it is closed."""
        self.listeners += 1
        following: dict[str, int] = {} if request is None else {request: 0}
        try:
            yield ": rounds\n\n"
            async for line in channel.listen(self.folder, self.ranks, request):
                if line is None:
                    yield ": waiting\n\n"
                    continue
                round_ = json.loads(line)
                name, index = round_["request"], round_["index"]
                lost = index - following.get(name, index)
                if lost < 0:
                    # What is kept was sent once more, for another listener.
                    continue
                if lost:
                    self.dropped += lost
                    yield _event({"rounds": lost}, "dropped")
                yield _event(round_)
                following[name] = index + 1
                if round_["stop"] is not None:
                    del following[name]
                    if request is not None:
                        yield _event({}, "end")
                        return
        finally:
            self.listeners -= 1

    async def snapshot(self) -> dict[str, Any]:
        """Counts since the server started, by process that runs the model. Raises TimeoutError if one is silent."""
        workers = await asyncio.gather(*(channel.counts(self.folder, rank) for rank in range(self.ranks)))
        return {
            "sglang_dspark": __version__,
            "listeners": self.listeners,
            "dropped": self.dropped + sum(w["dropped"] for w in workers),
            "workers": workers,
        }


def _event(data: dict[str, Any], name: str | None = None) -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def routes(*args: Any, **kwargs: Any) -> None:
    """Before SGLang's HTTP server runs: add the two routes to it."""
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.runtime_context import get_parallel

    folder = channel.folder()
    if folder is None:
        return
    watch = Watch(folder, get_parallel().num_dp_ranks)

    @app.get("/dspark/rounds")  # type: ignore[untyped-decorator]
    async def rounds(request: str | None = None) -> StreamingResponse:
        if watch.listeners >= MOST:
            raise HTTPException(503, f"{MOST} listeners are watching already; close one of them.")
        return StreamingResponse(watch.events(request), media_type="text/event-stream")

    @app.get("/dspark/snapshot")  # type: ignore[untyped-decorator]
    async def snapshot() -> dict[str, Any]:
        try:
            return await watch.snapshot()
        except TimeoutError:
            raise HTTPException(503, "A process that runs the model does not answer; the log may say why.") from None
