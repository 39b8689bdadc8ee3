"""One engine, many clients: order, limits, clients that leave, failures, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import httpx
import pytest

from .conftest import Running, user, wait

LONG = 5_000
Serve = Callable[..., Running]


@pytest.fixture
def slow(fake: ModuleType) -> Any:
    """An engine that takes a quarter of a minute for an answer of LONG tokens."""
    return fake.FakeEngine(sleep_s=0.01, context=10 * LONG)


@pytest.fixture
def held(fake: ModuleType) -> Any:
    """An engine that does nothing until its event `go` is set."""
    engine = fake.FakeEngine()
    engine.go, right = threading.Event(), engine.generate

    def generate(request: Any, cancelled: threading.Event | None = None) -> Any:
        assert engine.go.wait(60)
        yield from right(request, cancelled)

    engine.generate = generate
    return engine


def waiting(running: Running) -> list[str]:
    return [job["id"] for job in running.jobs.snapshot()["queue"]]


def busy(running: Running) -> str | None:
    job = running.jobs.snapshot()["running"]
    return job and job["id"]


def start(running: Running, pool: ThreadPoolExecutor, rid: str, **body: Any) -> Any:
    """A request in a thread of its own, once it is under way or waits."""
    future = pool.submit(running.chat, rid=rid, **body)
    wait(lambda: future.done() or busy(running) == rid or rid in waiting(running))
    return future


def test_requests_are_answered_in_the_order_in_which_they_came(serve: Serve, held: Any) -> None:
    running = serve(held)
    with ThreadPoolExecutor(8) as pool:
        futures = [start(running, pool, f"r{i}", stream=i % 2 == 1) for i in range(6)]
        assert busy(running) == "r0" and waiting(running) == [f"r{i}" for i in range(1, 6)]
        held.go.set()
        assert all(f.result().status_code == 200 for f in futures)
    assert [r.name for r in held.requests] == [f"r{i}" for i in range(6)]
    assert running.jobs.snapshot()["totals"]["answered"] == 6


def test_a_full_queue_turns_away_and_says_when_to_come_back(serve: Serve, held: Any) -> None:
    running = serve(held, most_waiting=2)
    with ThreadPoolExecutor(8) as pool:
        futures = [start(running, pool, f"r{i}") for i in range(3)]
        late = pool.submit(running.chat)
        wait(lambda: late.done() or len(waiting(running)) > 2)
        held.go.set()
        assert late.result().status_code == 429 and 1 <= int(late.result().headers["retry-after"]) <= 60
        assert late.result().json()["error"]["code"] == "queue_full"
        assert running.jobs.snapshot()["totals"]["turned_away"] == 1
        assert all(f.result().status_code == 200 for f in futures)
    assert running.chat().status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_stops_the_engine_at_the_next_round(serve: Serve, slow: Any, stream: bool) -> None:
    running = serve(slow)
    body = {"messages": [user("hi")], "max_tokens": LONG, "stream": stream}
    if stream:
        with running.http.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
            assert busy(running) is not None
    else:
        with pytest.raises(httpx.ReadTimeout):
            running.http.post("/v1/chat/completions", json=body, timeout=0.5)
    wait(lambda: busy(running) is None)
    assert running.jobs.snapshot()["totals"]["cancelled"] == 1
    assert running.chat(max_tokens=3).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_the_queue_is_not_decoded(serve: Serve, held: Any, stream: bool) -> None:
    running = serve(held)
    with ThreadPoolExecutor(2) as pool:
        first = start(running, pool, "first")
        with pytest.raises(httpx.ReadTimeout):
            running.http.post(
                "/v1/chat/completions", json={"messages": [user("hi")], "rid": "gone", "stream": stream}, timeout=1
            )
        try:
            wait(lambda: waiting(running) == [])
            assert busy(running) == "first" and running.jobs.snapshot()["totals"]["cancelled"] == 1
        finally:
            held.go.set()
        assert first.result().status_code == 200
    assert [r.name for r in held.requests] == ["first"]


def test_two_requests_under_way_cannot_have_one_name(serve: Serve, held: Any) -> None:
    running = serve(held)
    with ThreadPoolExecutor(2) as pool:
        first = start(running, pool, "same")
        second = pool.submit(running.chat, rid="same")
        wait(lambda: second.done() or waiting(running))
        held.go.set()
        assert second.result().status_code == 400 and second.result().json()["error"]["param"] == "rid"
        assert first.result().json()["id"] == "same"
    assert running.chat(rid="same").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_stopping_gives_every_client_an_end(serve: Serve, slow: Any, stream: bool) -> None:
    running = serve(slow)
    with ThreadPoolExecutor(3) as pool:
        first = start(running, pool, "first", max_tokens=LONG, stream=stream, n=2)
        second = start(running, pool, "second", stream=stream)
        wait(lambda: (running.jobs.snapshot()["running"] or {}).get("tokens", 0) > 3)
        running.jobs.stop()
        began = time.monotonic()
        ended = first.result()
        assert time.monotonic() - began < 5
        assert ended.status_code == 200 and "abort" in ended.text and " turns" in ended.text
        if stream:
            assert ended.text.endswith("data: [DONE]\n\n")
        else:
            reply = ended.json()
            assert [c["finish_reason"] for c in reply["choices"]] == ["abort"] * 2
            assert reply["dspark"]["stop"] == ["cancelled"] * 2
        assert second.result().status_code == 503
    assert running.chat().status_code == 503 and running.http.get("/health").status_code == 503


def test_a_failing_engine_is_one_failed_request(serve: Serve, engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    right = engine.generate
    fails_after = {"rounds": 0}

    def generate(request: Any, cancelled: threading.Event | None = None) -> Any:
        for number, round_ in enumerate(right(request, cancelled)):
            if number == fails_after["rounds"]:
                raise RuntimeError("out of luck")
            yield round_

    running = serve(engine)
    engine.generate = generate
    for stream in (False, True):
        failed = running.chat(stream=stream)
        assert failed.status_code == 500 and "out of luck" not in failed.text
        assert failed.json()["error"]["type"] == "server_error"
    assert "out of luck" in caplog.text
    fails_after["rounds"] = 2
    lines = running.chat(stream=True).text.splitlines()
    assert '"server_error"' in lines[-4] and lines[-2] == "data: [DONE]"
    engine.generate = right
    assert running.chat().status_code == 200
    totals = running.jobs.snapshot()["totals"]
    assert (totals["failed"], totals["answered"], totals["requests"]) == (3, 1, 4)
