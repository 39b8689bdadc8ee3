"""A remote server as a source of rounds (see `ui.server`), and beside it a server or a request without speculation.

From `dspark serve` both lanes are streams of rounds: the request's `"dspark": {"mode": …}` says which. SGLang tells of
rounds only where it speculates; its lane without is a stream of `choices[0].logprobs.content`, one entry a token, or of
text where there are none, whose times are those of arrival here. Without a server for it, the same one is asked with
`"custom_params": {"dspark": false}`. Where both lanes have rounds they are compared token by token, else by their text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from itertools import accumulate, count
from typing import Any

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError
from ui import machine, recording, service
from ui.messages import Lane, Message, round_message, run_message, statistics
from ui.parse import parse, parse_round
from ui.server import CHAT, ROUNDS, About, Server, Texts
from ui.verdict import verdict

LOOK_S = 0.05
"""How often a run looks whether it has been cancelled."""


class Remote:
    """Asks `url` for DSpark, and `plain_url`, or the same server again, for plain decoding."""

    def __init__(self, url: str, plain_url: str | None = None, key: str | None = None) -> None:
        self._dspark = Server(url, key)
        self._plain = Server(plain_url, key) if plain_url else self._dspark
        self._races = count()
        self._known: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The server."""
        return self._dspark.url

    def machine(self) -> dict[str, Any]:
        """What is here, which is not where it is decoded, and what the server has said of its engine."""
        return {"machine": machine.here(), "servers": sorted({self._dspark.url, self._plain.url}), **self._known}

    def run(self, run: service.Run) -> None:
        """Race or answer; a cancelled run leaves its requests at once, which ends them on the server."""
        asyncio.run(_unless_cancelled(run, self._run(run)))

    async def _run(self, run: service.Run) -> None:
        ask, settings = run.ask, run.ask.settings
        lanes: tuple[Lane, ...] = ("plain", "dspark") if next(self._races) % 2 == 0 else ("dspark", "plain")
        if ask.kind == "chat":
            lanes = ("plain",) if ask.plain else ("dspark",)
        async with AsyncExitStack() as stack:
            servers: dict[Lane, Server] = {"dspark": self._dspark, "plain": self._plain}
            for server in dict.fromkeys(servers.values()):
                await stack.enter_async_context(server)
            about = await self._dspark.about()
            if about.engine:
                self._known["engine"] = about.engine
            if ask.kind == "machine":
                run.tell({"type": "machine", "values": self.machine()})
                return
            run.tell(
                run_message(
                    id=run.id[:8],
                    prompt=ask.prompt,
                    pair=about.model if about.ours else None,
                    engine=about.engine.get("engine") if about.ours else "sglang",
                    device=about.engine.get("device"),
                    dtype=about.engine.get("dtype"),
                    machine=self.name,
                    max_new_tokens=settings.max_new_tokens,
                    sampling={"temperature": settings.temperature, "top_p": settings.top_p},
                    lanes=sorted(lanes, reverse=True),
                )
            )
            rounds: dict[Lane, list[Round]] = {}
            texts: dict[Lane, list[str]] = {lane: [] for lane in lanes}
            told = set()
            for lane in lanes:
                run.state("running", lane=lane)
                server = servers[lane]
                asked = about if server is self._dspark else await server.about()
                decode = _plain
                if asked.ours or lane == "dspark":
                    decode = _in_rounds
                    told.add(lane)
                body = _body(run, lane, asked, alone=self._plain is not self._dspark)
                rounds[lane] = await decode(server, run, lane, body, texts[lane])
                if not rounds[lane]:
                    raise InputError(f"{server.url} sent no rounds for the {lane} lane; its log may say why.")
                run.state("finished", lane=lane)
        for lane in lanes:
            block = max(len(r.drafted) for r in rounds[lane])
            run.tell({"type": "statistics", "lane": lane, "values": statistics(rounds[lane], block)})
        if ask.kind == "race":
            same: bool | None = None
            difference = None
            if settings.temperature == 0 and len(told) == len(lanes):
                judged = recording.compare(rounds["plain"], rounds["dspark"])
                same, difference = judged["identical"], judged["first_difference"]
            elif settings.temperature == 0:
                same, difference = compare(texts["plain"], texts["dspark"])
            run.tell(verdict(rounds["plain"], rounds["dspark"], same, ask.language, difference))


async def _unless_cancelled(run: service.Run, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    while not task.done():
        if run.cancelled.is_set():
            task.cancel()
        await asyncio.wait({task}, timeout=LOOK_S)
    if not (task.cancelled() or run.cancelled.is_set()):
        task.result()


async def _in_rounds(
    server: Server, run: service.Run, lane: Lane, body: dict[str, Any], said: list[str]
) -> list[Round]:
    """The rounds of a request, told as they come beside its text."""
    rounds: list[Round] = []

    async def watch() -> None:
        texts = Texts(server)
        async for event in server.events("GET", ROUNDS, params={"request": body["rid"]}):
            try:
                round_ = parse_round(event.get("round", event))
                run.tell(await _message(lane, round_, event, texts))
            except InputError as error:
                raise InputError(f"{server.url} sent a round that cannot be read: {error}.") from error
            rounds.append(round_)
            if round_.stop is not None:
                return

    async def ask() -> None:
        async for event in server.events("POST", CHAT, json=body):
            said.extend(_said(event)[0])

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            group.create_task(ask())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return rounds


async def _plain(server: Server, run: service.Run, lane: Lane, body: dict[str, Any], said: list[str]) -> list[Round]:
    """A round a token. Ids are numbers of the distinct texts that are met, because a server sends none."""
    ids: dict[str, int] = {}
    rounds: list[Round] = []
    last, anchor = time.perf_counter(), 0
    async for event in server.events("POST", CHAT, json=body):
        pieces, stop = _said(event)
        now = time.perf_counter()
        for left, piece in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
            token, at, seconds = ids.setdefault(piece, len(ids)), len(rounds), (now - last) / len(pieces)
            ended = None if left else stop
            round_ = Round("plain", at, at, anchor, (), (), 0, 0, token, (token,), ended, 0.0, seconds)
            run.tell(round_message(lane, round_, [piece], []))
            said.append(piece)
            rounds.append(round_)
            anchor = token
        last = now if pieces else last
    return rounds


async def _message(lane: Lane, round_: Round, event: dict[str, Any], texts: Texts) -> Message:
    if "pieces" in event:
        pieces, ghosts = event["pieces"], event.get("ghosts")
    else:
        pieces, ghosts = await texts.of(round_)
    made = round_message(lane, round_, [], []) | {"pieces": pieces, "ghosts": ghosts}
    return parse(made) or made


def _body(run: service.Run, lane: Lane, asked: About, *, alone: bool) -> dict[str, Any]:
    """The request for one lane, as the server that was `asked` understands it; `alone`, plain decoding has its own."""
    settings = run.ask.settings
    body: dict[str, Any] = {
        "model": asked.model,
        "messages": list(run.ask.conversation),
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stream": True,
        "rid": f"{run.id}-{lane}",
    }
    if settings.seed is not None:
        body["seed"] = settings.seed
    if asked.ours:
        body["dspark"] = {"mode": lane}
    elif lane == "plain":
        body["logprobs"] = True
        if not alone:
            body["custom_params"] = {"dspark": False}
    return body


def compare(plain: list[str], dspark: list[str]) -> tuple[bool, dict[str, Any] | None]:
    """Whether two streams of pieces are the same text, and else the plain token in which they part."""
    a, b = "".join(plain), "".join(dspark)
    if a == b:
        return True, None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    position = sum(end <= at for end in accumulate(map(len, plain)))
    return False, {"position": position, "margin": None, "noise": None, "numerics": False}


def _said(event: dict[str, Any]) -> tuple[list[str], str | None]:
    """The pieces of text in an event of a chat's stream, a token each where tokens are told apart, and its stop."""
    try:
        choice = event["choices"][0]
        tokens = [str(t["token"]) for t in (choice.get("logprobs") or {}).get("content") or []]
        text = choice.get("delta", {}).get("content") or ""
        reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        return [], None
    stop = None if reason is None else "length" if reason == "length" else "eos"
    return (tokens if "".join(tokens) == text else [text] if text else []), stop
