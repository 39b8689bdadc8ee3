"""What is asked of one OpenAI-compatible server that tells of its rounds: SGLang with our plugin, or `dspark serve`.

- `POST {url}/v1/chat/completions` with `stream` and a request id of our own, `rid`.
- `GET {url}/dspark/rounds?request=RID` answers `text/event-stream`. An event's data is a Round as JSON, or an object
  with the `round` and the texts of its tokens as `pieces` and `ghosts`. The stream may be opened before the request
  comes or a little later, starts at its first round, and ends with it; an event `end` may say so, and an event
  `dropped` says that rounds were lost.
- `POST {url}/detokenize` with `{"tokens": [[…], …]}` answers `{"text": ["…", …]}`.
- `GET {url}/v1/models`, whose `owned_by` is "dspark" where `dspark serve` answers; `GET {url}/dspark/snapshot` then has
  the description of its engine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError
from ui.messages import GHOST_CONTEXT

TIMEOUT = httpx.Timeout(10.0, read=60.0)
LONGEST_EVENT = 1_000_000
LONGEST_COMPLAINT = 300
CHAT, ROUNDS, TEXTS = "/v1/chat/completions", "/dspark/rounds", "/detokenize"


@dataclass(frozen=True, slots=True)
class About:
    """Who answers: the name of the model, whether it is `dspark serve`, and then its engine's description."""

    model: str
    ours: bool
    engine: dict[str, Any]


class Server:
    """One server. Everything raises InputError where it does not answer as described above."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> Server:
        # No proxy of the environment: a server is named by who starts the page, and reached as named.
        self._http = httpx.AsyncClient(timeout=TIMEOUT, headers=self._headers, trust_env=False)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def about(self) -> About:
        """Who it is; a server that does not say is taken for SGLang."""
        models = (await self._object("/v1/models")).get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        if first.get("owned_by") != "dspark":
            return About("default", False, {})
        engine = (await self._object("/dspark/snapshot")).get("engine")
        plain = {k: v for k, v in engine.items() if isinstance(v, str | int)} if isinstance(engine, dict) else {}
        return About(str(first.get("id")), True, plain)

    async def events(self, method: str, path: str, **more: Any) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, until it ends."""
        try:
            async with self._http.stream(method, self.url + path, **more) as response:
                if response.status_code == 404 and path == ROUNDS:
                    raise InputError(f"{self.url} has no DSpark round stream ({path}); start it with our plugin.")
                if response.status_code != 200:
                    raise InputError(self._complaint(path, response.status_code, await response.aread()))
                name = ""
                async for line in response.aiter_lines():
                    field, _, value = line.partition(":")
                    value = value.strip()
                    if field == "event":
                        name = value
                    elif field == "data" and (name == "end" or value == "[DONE]"):
                        return
                    elif field == "data":
                        yield self._event(name, value)
                    elif not line:
                        name = ""
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    async def decode(self, tokens: Sequence[Sequence[int]]) -> list[str] | None:
        """The text of each list of tokens, or None from a server that does not tell."""
        given = [list(ids) for ids in tokens if ids]
        try:
            answer = await self._http.post(self.url + TEXTS, json={"tokens": given})
            found = answer.json().get("text") if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        if not isinstance(found, list) or len(found) != len(given) or not all(isinstance(t, str) for t in found):
            return None
        texts = iter(found)
        return [next(texts) if ids else "" for ids in tokens]

    async def _object(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._http.get(self.url + path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if answer.status_code in (401, 403):
            raise InputError(self._complaint(path, answer.status_code, answer.content))
        try:
            found = answer.json()
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {}

    def _event(self, name: str, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text) if len(text) <= LONGEST_EVENT else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise InputError(f"{self.url} sent something else than JSON objects; is it an SGLang server?")
        if name == "dropped":
            raise InputError(f"{self.url} lost rounds before they could be read; start the run again.")
        if "error" in found:
            raise InputError(f"{self.url} refused: {_said_of(found)}")
        return found

    def _complaint(self, path: str, status: int, body: bytes) -> str:
        try:
            said = _said_of(json.loads(body))
        except (ValueError, RecursionError):
            said = "its log may say why."
        return f"{self.url}{path} answered {status}; {said}"

    def _unreachable(self, error: Exception) -> InputError:
        return InputError(f"{self.url} cannot be reached ({type(error).__name__}); is the server up?")


class Texts:
    """The texts of a lane's tokens, from the server's own detokeniser; ids stand for them where it has none.

    As in a local lane, a token that completes no character has no text, and the one that completes it has all of it.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._whole: tuple[int, ...] = ()
        self._open: tuple[int, ...] = ()

    async def of(self, round_: Round) -> tuple[list[str], list[str]]:
        """The texts of a round's committed and drafted tokens; to be asked round by round."""
        before, committed, drafted = (*self._whole, *self._open), round_.committed, round_.drafted
        asked = [self._whole]
        asked += [(*before, *tokens[: k + 1]) for tokens in (committed, drafted) for k in range(len(tokens))]
        texts = await self._server.decode(asked)
        if texts is None:
            return [f" {t}" for t in committed], [f" {t}" for t in drafted]
        middle = 1 + len(committed)
        if committed:
            after = (*before, *committed)
            whole = max((k for k in range(middle) if not texts[k].endswith("\ufffd")), default=0)
            end = len(before) + whole if whole else len(self._whole)
            if len(after) - end > GHOST_CONTEXT:  # no character is that long: these bytes are none
                end = len(after)
            self._whole, self._open = after[:end][-GHOST_CONTEXT:], after[end:]
        return _steps(texts[0], texts[1:middle]), _steps(texts[0], texts[middle:])


def _steps(seen: str, texts: Sequence[str]) -> list[str]:
    """What each of `texts` adds to the one before it, nothing where it ends within a character."""
    steps = []
    for text in texts:
        whole = not text.endswith("\ufffd")
        steps.append(text[len(seen) :] if whole else "")
        seen = text if whole else seen
    return steps


def _said_of(body: Any) -> str:
    """The sentence in an error of OpenAI's or SGLang's shape."""
    error = body.get("error", body) if isinstance(body, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return said[:LONGEST_COMPLAINT] if isinstance(said, str) and said else "its log may say why."
