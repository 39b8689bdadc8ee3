"""The routes.

OpenAI's: `/v1/models`, `/v1/chat/completions`, `/v1/completions`. Ours: `/dspark/rounds`, the rounds of all requests
or of `?request=ID` as server-sent events; `/dspark/snapshot`; `/detokenize`, `{"tokens": [[…], …]}` to `{"text": […]}`,
for whoever shows rounds; and `/health`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from local_runner.engine import text_stream
from local_runner.server.feed import follow
from local_runner.server.guard import Guard
from local_runner.server.jobs import Job, Jobs
from local_runner.server.protocol import Fields, Kind, read_ask
from local_runner.server.refusal import Refused
from local_runner.server.replies import Reply

LARGEST_BODY = 4 << 20
"""Bytes of a request: the token ids of a prompt that fills a long context."""
MOST_TOKENS = 65536
"""Tokens that are turned into text at once."""
CLOSED = 499
"""The status that nobody sees, because the client has gone."""
T = TypeVar("T")


class Answering(StreamingResponse):
    """A reply that streams, and cancels its job however it ends."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[str], jobs: Jobs, job: Job) -> None:
        super().__init__(chunks, headers={"Cache-Control": "no-store"})
        self._jobs, self._job = jobs, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._jobs.cancel(self._job)


def make_app(
    jobs: Jobs,
    *,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    hosts: frozenset[str] | None = None,
) -> Starlette:
    """The application for a queue that is open. Pages of `origins` may ask too; `api_key` and `hosts` as in Guard."""
    served = jobs.served
    model = {"id": served.name, "object": "model", "created": 0, "owned_by": "dspark"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != served.name:
            raise Refused("There is no such model here.", "model", status=404, code="model_not_found")
        return JSONResponse(model)

    async def chat(request: Request) -> Response:
        return await answer(request, "chat")

    async def complete(request: Request) -> Response:
        return await answer(request, "text")

    async def answer(request: Request, kind: Kind) -> Response:
        job = jobs.add(read_ask(await read_json(request), kind, served))
        reply = Reply(job, served.name)
        try:
            if not job.ask.stream:
                return JSONResponse(await while_connected(request, reply.whole()))
            await while_connected(request, job.started())
        except BaseException:
            jobs.cancel(job)
            raise
        return Answering(reply.chunks(), jobs, job)

    async def rounds(request: Request) -> Response:
        events = follow(jobs.feed, request.query_params.get("request"))
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def snapshot(request: Request) -> Response:
        return JSONResponse(jobs.snapshot())

    async def detokenize(request: Request) -> Response:
        given = Fields(await read_json(request)).take("tokens", list, [])
        fits = all(isinstance(ids, list) and all(type(t) is int and 0 <= t < 2**31 for t in ids) for ids in given)
        if not fits or sum(map(len, given)) + len(given) > MOST_TOKENS:
            raise Refused(f"tokens must be lists of token ids, of at most {MOST_TOKENS} tokens in all.", "tokens")
        engine = served.engine
        decode = engine.decode if engine.tokenizer is not None else text_stream(engine).push
        return JSONResponse({"text": await asyncio.to_thread(lambda: [decode(ids) for ids in given])})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "stopping" if jobs.stopping else "ok"}, 503 if jobs.stopping else 200)

    middleware = [Middleware(Guard, api_key=api_key, hosts=hosts)]
    if origins:
        # Outermost, because a browser asks for leave without the key.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/dspark/rounds", rounds),
            Route("/dspark/snapshot", snapshot),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/health", health),
        ],
        middleware=middleware,
        exception_handlers={Refused: refuse, HTTPException: refuse, ClientDisconnect: refuse, Exception: refuse},
    )


async def refuse(request: Request, error: Exception) -> Response:
    """The error in OpenAI's shape."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLOSED)
    if isinstance(error, HTTPException):
        error = Refused(f"{request.method} {request.url.path}: {error.detail}.", status=error.status_code)
    elif not isinstance(error, Refused):
        error = Refused("The server failed; its log says why.", status=500)
    return JSONResponse(error.body(), error.status, error.headers)


async def read_json(request: Request) -> Any:
    """The body as JSON. Raises Refused if it is too large or none."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            closing = {"Connection": "close"}  # or what follows would be read to its end
            raise Refused(f"The request is larger than {LARGEST_BODY} bytes.", status=413, headers=closing)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused("The request is not JSON.", code="invalid_json") from error


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises ClientDisconnect, and drops the work, when the client goes before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
