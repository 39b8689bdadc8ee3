"""The page's own routes, under /dspark/: static files, runs and their streams of messages, exports, the machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from local_runner.options import Settings
from sglang_dspark.errors import InputError
from ui import view, words
from ui.ask import LONGEST_TEXT, read_ask
from ui.export import export_html, export_jsonl, summary
from ui.messages import Message
from ui.service import Run, Service

ASSETS: dict[str, tuple[str, Callable[[], str]]] = {
    "view.js": ("text/javascript", view.script),
    "view.css": ("text/css", view.css),
    "page.js": ("text/javascript", words.script),
    "page.css": ("text/css", words.css),
}
LARGEST_REQUEST = 8 * LONGEST_TEXT
PERIOD_S = 0.04
"""How often a stream looks for new messages: well below the 100 ms that a token may take to the screen."""
HEARTBEAT_S = 10.0

EXPORTS = {
    "jsonl": ("application/x-ndjson", export_jsonl),
    "html": ("text/html", export_html),
    "txt": ("text/plain", summary),
}


def routes(service: Service, base: Settings) -> APIRouter:
    """The routes on `service`; what visitors ask for goes on top of the settings `base`."""
    router = APIRouter(prefix="/dspark", include_in_schema=False)

    def find(id_: str) -> Run:
        run = service.find(id_)
        if run is None:
            raise HTTPException(404, "This run is no longer kept; start it again.")
        return run

    @router.get("/assets/{name}")
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise HTTPException(404)
        media, text = ASSETS[name]
        return Response(text(), media_type=media, headers={"Cache-Control": "no-cache"})

    @router.post("/runs")
    async def submit(request: Request) -> Response:
        # Pages of other hosts can send a form or plain text here unasked, but not this type.
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "Send JSON.")
        try:
            run = service.submit(read_ask(await _json(request), base))
        except InputError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"id": run.id})

    @router.get("/runs/{id_}/events")
    async def events(id_: str, request: Request, after: int = 0) -> Response:
        run = find(id_)
        last = request.headers.get("last-event-id", "")
        return StreamingResponse(
            _stream(run, int(last) if last.isascii() and last.isdigit() else after),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @router.post("/runs/{id_}/cancel")
    async def cancel(id_: str) -> Response:
        service.cancel(find(id_))
        return Response(status_code=204)

    @router.get("/runs/{id_}/run.{kind}")
    async def export(id_: str, kind: str) -> Response:
        run = find(id_)
        if kind not in EXPORTS:
            raise HTTPException(404)
        media, make = EXPORTS[kind]
        recording = recorded(await asyncio.to_thread(run.after))
        if not recording:
            raise HTTPException(409, "Nothing has been decoded yet.")
        headers = {"Content-Disposition": f'attachment; filename="dspark-run.{kind}"'}
        return Response(make(recording), media_type=f"{media}; charset=utf-8", headers=headers)

    @router.get("/machine")
    def machine() -> Response:
        return JSONResponse(service.source.machine())

    return router


def recorded(messages: list[Message]) -> list[Message]:
    """The recording in the messages of a run: what follows the `run` message, which says what runs."""
    start = next((i for i, m in enumerate(messages) if m["type"] == "run"), len(messages))
    return messages[start:]


async def _stream(run: Run, sent: int) -> AsyncIterator[str]:
    """The run's messages after the first `sent`, in batches, as server-sent events whose ids count messages."""
    quiet = 0.0
    with run.reader():
        while True:
            over = run.done.is_set()
            if batch := await asyncio.to_thread(run.after, sent):
                sent += len(batch)
                quiet = 0.0
                yield f"id: {sent}\ndata: {json.dumps(batch)}\n\n"
            if over:
                yield f"id: {sent}\nevent: end\ndata: {{}}\n\n"
                return
            await asyncio.sleep(PERIOD_S)
            quiet += PERIOD_S
            if quiet > HEARTBEAT_S:
                quiet = 0.0
                yield ": still here\n\n"


async def _json(request: Request) -> Any:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_REQUEST:
            raise InputError(f"The text is longer than {LONGEST_TEXT:,} characters; shorten it.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError("The request is not JSON; reload the page.") from error
