"""What is asked of a running SGLang server by those who prove and measure it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from sglang_dspark.errors import InputError

TIMEOUT = httpx.Timeout(20.0, read=900.0)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, what is asked beside it, and its kind for a report."""

    kind: str
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of an answer, and what the server told about it."""

    tokens: tuple[int, ...]
    meta: dict[str, Any]


class Client:
    """One server. Raises InputError where it cannot be reached or refuses."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(timeout=TIMEOUT, headers=headers, trust_env=False)

    def ask(self, asked: Ask) -> Answer:
        """The answer to one request, greedy unless its sampling says otherwise."""
        sampling = {"temperature": 0, "ignore_eos": True, **asked.sampling}
        body = {"input_ids": list(asked.prompt), "sampling_params": sampling, **asked.more}
        found = self.post("/generate", body)
        return Answer(tuple(found["output_ids"]), found["meta_info"])

    def together(self, asks: Iterable[Ask], most: int = 16) -> list[Answer]:
        """The answers to requests of which at most `most` are open at a time."""
        with ThreadPoolExecutor(most) as pool:
            return list(pool.map(self.ask, asks))

    def tokenise(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of texts, by the server's own tokenizer."""
        return [tuple(t) for t in self.post("/tokenize", {"prompt": list(texts)})["tokens"]]

    def context(self) -> int:
        """How many tokens a request may have."""
        found = self._get("/v1/models")
        try:
            return int(found["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(f"{self.url} does not say how long its context is; is it an SGLang server?") from error

    def speculates(self) -> bool:
        """Whether the server says that it uses DSPARK."""
        return (self._get("/server_info").get("speculative_algorithm") or "").upper() == "DSPARK"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that is answered to `body`."""
        try:
            reply = self._http.post(self.url + path, json=body)
        except httpx.HTTPError as error:
            raise InputError(f"{self.url} cannot be reached ({type(error).__name__}); is the server up?") from error
        return self._checked(path, reply)

    def _get(self, path: str) -> Any:
        try:
            return self._checked(path, self._http.get(self.url + path))
        except httpx.HTTPError as error:
            raise InputError(f"{self.url} cannot be reached ({type(error).__name__}); is the server up?") from error

    def _checked(self, path: str, reply: httpx.Response) -> Any:
        if reply.status_code != 200:
            raise InputError(f"{self.url}{path} answered {reply.status_code}: {reply.text[:200].strip()}")
        try:
            return reply.json()
        except ValueError as error:
            raise InputError(f"{self.url}{path} did not answer JSON; is it an SGLang server?") from error
