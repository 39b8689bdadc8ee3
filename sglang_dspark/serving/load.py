"""A closed loop of users against running servers: what each gets, and what all get, as they become more."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

import httpx

from sglang_dspark.errors import InputError


@dataclass(frozen=True, slots=True)
class Point:
    """One server at one number of users: medians over requests and over repeats. Times are seconds.

    TTFT is until the first token, TPOT = (e2e - TTFT) / (tokens - 1), τ the tokens of a round with its bonus.
    """

    server: str
    users: int
    tokens_per_s: float
    tokens_per_s_user: float
    ttft_s: float
    tpot_s: float
    mean_accepted_length: float | None


@dataclass(frozen=True, slots=True)
class _Request:
    tokens: int
    ttft: float
    seconds: float
    accepted: float | None


def sweep(
    servers: Mapping[str, str],
    prompts: Sequence[Sequence[int]],
    users: Sequence[int],
    tokens: int,
    repeats: int,
    say: Callable[[str], None],
    key: str | None = None,
) -> list[Point]:
    """Measure every server at every number of users, interleaved and repeated. Each user asks twice, greedily, for
    `tokens` tokens; all servers get the same prompts. Raises InputError where a server refuses or fails.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found: dict[tuple[str, int], list[Point]] = {}
    with httpx.Client(
        timeout=httpx.Timeout(20.0, read=900.0),
        headers=headers,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    ) as http:
        for url in servers.values():
            _request(http, url, prompts[0], tokens)
        for repeat in range(repeats):
            for count in users:
                for name in list(servers)[:: 1 if repeat % 2 == 0 else -1]:
                    say(f"{name}, {count} users, {repeat + 1} of {repeats}")
                    asked = list(islice(cycle(prompts), 2 * count))
                    found.setdefault((name, count), []).append(_point(http, name, servers[name], asked, count, tokens))
    return [_median(points) for points in found.values()]


def _point(http: httpx.Client, name: str, url: str, prompts: Sequence[Sequence[int]], users: int, tokens: int) -> Point:
    start = time.perf_counter()
    with ThreadPoolExecutor(users) as pool:
        done = list(pool.map(lambda p: _request(http, url, p, tokens), prompts))
    seconds = time.perf_counter() - start
    accepted = [r.accepted for r in done if r.accepted is not None]
    return Point(
        server=name,
        users=users,
        tokens_per_s=sum(r.tokens for r in done) / seconds,
        tokens_per_s_user=statistics.median(r.tokens / r.seconds for r in done),
        ttft_s=statistics.median(r.ttft for r in done),
        tpot_s=statistics.median((r.seconds - r.ttft) / max(r.tokens - 1, 1) for r in done),
        mean_accepted_length=statistics.mean(accepted) if accepted else None,
    )


def _request(http: httpx.Client, url: str, prompt: Sequence[int], tokens: int) -> _Request:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    start, first, meta = time.perf_counter(), None, {}
    try:
        with http.stream("POST", f"{url.rstrip('/')}/generate", json=body) as reply:
            if reply.status_code != 200:
                raise InputError(f"{url} answered {reply.status_code}: {reply.read()[:200].decode(errors='replace')}")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
                    told = json.loads(line.removeprefix("data: "))
                    if "error" in told:
                        raise InputError(f"{url} failed: {told['error']}")
                    meta = told["meta_info"]
    except httpx.HTTPError as error:
        raise InputError(f"{url} cannot be reached ({type(error).__name__}); is the server up?") from error
    end = time.perf_counter()
    if first is None:
        raise InputError(f"{url} answered nothing; its log may say why.")
    return _Request(meta["completion_tokens"], first - start, end - start, meta.get("spec_accept_length"))


def _median(points: Sequence[Point]) -> Point:
    data: dict[str, Any] = asdict(points[0])
    for name in ("tokens_per_s", "tokens_per_s_user", "ttft_s", "tpot_s"):
        data[name] = statistics.median(getattr(p, name) for p in points)
    return Point(**data)


def turning_point(points: Sequence[Point], plain: str, other: str) -> int | None:
    """The smallest number of users from which on `other` gives fewer tokens a second than `plain`; None if never."""
    rates = {(p.server, p.users): p.tokens_per_s for p in points}
    users = sorted({p.users for p in points})
    loses = [rates[other, n] < rates[plain, n] for n in users]
    return next((n for i, n in enumerate(users) if all(loses[i:])), None)
