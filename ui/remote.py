"""A remote SGLang server as a source of rounds, and beside it a server (or a request) without speculation.

The requests are OpenAI-compatible: `POST {url}/v1/chat/completions` with `stream` and a request id of our own, `rid`.
From a server with the DSpark plugin the rounds come beside the text:

- `GET {url}/dspark/rounds?request=RID` answers `text/event-stream`. An event's data is a Round as JSON, or an object
  with the `round` and the texts of its tokens as `pieces` and `ghosts`. The stream may be opened before the request
  comes or a little later, starts at its first round, and ends with it.
- `POST {url}/detokenize` with `{"tokens": [[…], …]}` answers `{"text": ["…", …]}`. It is asked, a token at a time, for
  the texts of rounds that bring none; a character that spans tokens is not put together then.

A lane without speculation is a stream of `choices[0].logprobs.content`, one entry a token, or of text where there are
none; its times are those of arrival here. Without a server for it, the same one is asked with
`"custom_params": {"dspark": false}`. Whether both lanes said the same is judged by the text of the requests.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import accumulate, count
from typing import Any

import httpx

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError
from ui import machine, service
from ui.messages import Lane, Message, round_message, run_message, statistics
from ui.parse import parse, parse_round
from ui.verdict import verdict

TIMEOUT = httpx.Timeout(10.0, read=60.0)
LONGEST_EVENT = 1_000_000
PATHS = {"chat": "/v1/chat/completions", "rounds": "/dspark/rounds", "texts": "/detokenize"}


class Server:
    """What is asked of one server. Everything raises InputError where the server does not answer as described."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # No proxy of the environment: a server is named by who starts the page, and reached as named.
        self._http = httpx.Client(timeout=TIMEOUT, trust_env=False)
        self._texts: dict[int, str] = {}

    def events(self, method: str, what: str, cancelled: threading.Event, **more: Any) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, until it ends or `cancelled` is set."""
        path = PATHS[what]
        try:
            with self._http.stream(method, self.url + path, **more) as response:
                if response.status_code == 404 and what == "rounds":
                    raise InputError(f"{self.url} has no DSpark round stream ({path}); start it with our plugin.")
                if response.status_code != 200:
                    raise InputError(f"{self.url}{path} answered {response.status_code}; its log may say why.")
                for line in response.iter_lines():
                    text = line.removeprefix("data:").strip()
                    if cancelled.is_set() or text == "[DONE]":
                        return
                    if line.startswith("data:") and len(line) <= LONGEST_EVENT:
                        yield self._object(text)
        except httpx.HTTPError as error:
            raise InputError(f"{self.url} cannot be reached ({type(error).__name__}); is the server up?") from error

    def texts(self, tokens: tuple[int, ...]) -> list[str]:
        """The text of each token; asked once for each."""
        if unknown := sorted(set(tokens) - self._texts.keys()):
            try:
                answer = self._http.post(self.url + PATHS["texts"], json={"tokens": [[t] for t in unknown]})
                found = self._object(answer.text).get("text")
            except httpx.HTTPError:
                found = None
            if not isinstance(found, list) or len(found) != len(unknown):
                found = [f" {token}" for token in unknown]
            self._texts.update(zip(unknown, map(str, found), strict=True))
        return [self._texts[token] for token in tokens]

    def _object(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise InputError(f"{self.url} sent something else than JSON objects; is it an SGLang server?")
        return found


class Remote:
    """Asks `url` for DSpark, and `plain_url`, or the same server again, for plain decoding."""

    def __init__(self, url: str, plain_url: str | None = None) -> None:
        self._dspark = Server(url)
        self._plain = Server(plain_url) if plain_url else self._dspark
        self._races = count()

    @property
    def name(self) -> str:
        """The server."""
        return self._dspark.url

    def machine(self) -> dict[str, Any]:
        """What is here, which is not where it is decoded."""
        return {"machine": machine.here(), "servers": sorted({self._dspark.url, self._plain.url})}

    def run(self, run: service.Run) -> None:
        """Race or answer."""
        ask = run.ask
        if ask.kind == "machine":
            run.tell({"type": "machine", "values": self.machine()})
            return
        lanes: tuple[Lane, ...] = ("plain", "dspark") if next(self._races) % 2 == 0 else ("dspark", "plain")
        if ask.kind == "chat":
            lanes = ("plain",) if ask.plain else ("dspark",)
        settings = ask.settings
        run.tell(
            run_message(
                id=run.id[:8],
                prompt=ask.prompt,
                engine="sglang",
                machine=self.name,
                max_new_tokens=settings.max_new_tokens,
                sampling={"temperature": settings.temperature, "top_p": settings.top_p},
                lanes=sorted(lanes, reverse=True),
            )
        )
        rounds: dict[Lane, list[Round]] = {}
        texts: dict[Lane, list[str]] = {lane: [] for lane in lanes}
        for lane in lanes:
            run.state("running", lane=lane)
            decode = self._decode_speculatively if lane == "dspark" else self._decode_plainly
            rounds[lane] = list(decode(run, texts[lane]))
            if run.cancelled.is_set():
                return
            if not rounds[lane]:
                raise InputError(f"{self.name} sent no rounds for the {lane} lane; its log may say why.")
            run.state("finished", lane=lane)
        for lane in lanes:
            block = max(len(r.drafted) for r in rounds[lane])
            run.tell({"type": "statistics", "lane": lane, "values": statistics(rounds[lane], block)})
        if ask.kind == "race":
            greedy = settings.temperature == 0
            same, difference = compare(texts["plain"], texts["dspark"]) if greedy else (None, None)
            run.tell(verdict(rounds["plain"], rounds["dspark"], same, ask.language, difference))

    def _decode_speculatively(self, run: service.Run, texts: list[str]) -> Iterator[Round]:
        """The rounds of a request that is streamed beside them, told as they come."""
        body = self._body(run, "dspark")
        trouble: list[InputError] = []

        def ask() -> None:
            try:
                for event in self._dspark.events("POST", "chat", run.cancelled, json=body):
                    texts.extend(_said(event)[0])
            except InputError as error:
                trouble.append(error)

        rounds = self._dspark.events("GET", "rounds", run.cancelled, params={"request": body["rid"]})
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        try:
            for event in rounds:
                try:
                    round_ = parse_round(event.get("round", event))
                    run.tell(self._message(round_, event))
                except InputError as error:
                    raise InputError(f"{self.name} sent a round that cannot be read: {error}.") from error
                yield round_
                if round_.stop is not None or trouble:
                    break
            asking.join(timeout=TIMEOUT.read)
        finally:
            if trouble:
                raise trouble[0]

    def _decode_plainly(self, run: service.Run, texts: list[str]) -> Iterator[Round]:
        """A round a token. Ids are numbers of the distinct texts that are met, because a server sends none."""
        ids: dict[str, int] = {}
        last, index, anchor = time.perf_counter(), 0, 0
        for event in self._plain.events("POST", "chat", run.cancelled, json=self._body(run, "plain")):
            pieces, stop = _said(event)
            now = time.perf_counter()
            for left, piece in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
                token = ids.setdefault(piece, len(ids))
                seconds = (now - last) / len(pieces)
                round_ = Round(
                    "plain", index, index, anchor, (), (), 0, 0, token, (token,), None if left else stop, 0.0, seconds
                )
                run.tell(round_message("plain", round_, [piece], []))
                texts.append(piece)
                yield round_
                index, anchor = index + 1, token
            last = now if pieces else last

    def _body(self, run: service.Run, lane: Lane) -> dict[str, Any]:
        settings = run.ask.settings
        body: dict[str, Any] = {
            "model": "default",
            "messages": list(run.ask.conversation),
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "stream": True,
            "rid": f"{run.id}-{lane}",
        }
        if settings.seed is not None:
            body["seed"] = settings.seed
        if lane == "plain":
            body["logprobs"] = True
            if self._plain is self._dspark:
                body["custom_params"] = {"dspark": False}
        return body

    def _message(self, round_: Round, event: dict[str, Any]) -> Message:
        texts = self._dspark.texts
        made = round_message("dspark", round_, [], [])
        if "pieces" in event:
            made |= {"pieces": event["pieces"], "ghosts": event.get("ghosts")}
        else:
            made |= {"pieces": texts(round_.committed), "ghosts": texts(round_.drafted)}
        return parse(made) or made


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
