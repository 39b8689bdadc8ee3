"""Watching: the stream of rounds and the snapshot."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import ModuleType
from typing import Any

from local_runner.server.feed import Feed, follow
from sglang_dspark.decoding.rounds import Round, summarise

from .conftest import Running, wait


def made(index: int, request: str = "a") -> Round:
    return Round(request, index, index, 0, (), (), 0, 0, index, (index,), None, 0.0, 0.01)


def read(text: str) -> Iterator[tuple[str, Any]]:
    """The events of a stream: name and data."""
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            yield fields.get("event", "round"), json.loads(fields["data"])


def collect(feed: Feed, job: str | None) -> list[tuple[str, Any]]:
    """What a watcher gets who comes now; the stream must end by itself."""

    async def all_of_it() -> str:
        return "".join([part async for part in follow(feed, job)])

    return list(read(asyncio.run(asyncio.wait_for(all_of_it(), 20))))


def test_one_request_is_followed_from_its_first_round_to_its_end() -> None:
    feed = Feed()
    for i in range(3):
        feed.append("a", i, made(i))
        feed.append("b", i, made(i, "b"))
    feed.end("a", 3)
    events = collect(feed, "a")
    assert [name for name, _ in events] == ["round"] * 3 + ["end"]
    assert [Round.from_dict(data) for _, data in events[:3]] == [made(i) for i in range(3)]


def test_memory_is_bounded_and_what_is_dropped_is_counted() -> None:
    feed = Feed(size=4)
    for i in range(10):
        feed.append("a", i, made(i))
    assert len(feed.after(0)) == 4 and feed.count == 10
    feed.end("a", 10)
    events = collect(feed, "a")
    assert events[0] == ("dropped", {"rounds": 6}) and [d["index"] for _, d in events[1:5]] == [6, 7, 8, 9]
    for i in range(4):
        feed.append("b", i, made(i, "b"))
    assert collect(feed, "a") == [("dropped", {"rounds": 10}), ("end", {})]
    for i in range(3000):
        feed.end(f"x{i}", 0)
    assert len(feed._ends) == 1024


def test_a_slow_watcher_misses_the_oldest_and_holds_nobody_up() -> None:
    feed = Feed(size=8)

    async def watch() -> str:
        stream = follow(feed, None)
        feed.append("a", 0, made(0))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        feed.append("a", 1, made(1))
        parts = [await first]
        for i in range(2, 102):
            feed.append("a", i, made(i))
        feed.closed = True
        return "".join(parts + [part async for part in stream])

    events = list(read(asyncio.run(watch())))
    rounds = [data["index"] for name, data in events if name == "round"]
    missed = sum(data["rounds"] for name, data in events if name == "dropped")
    assert rounds == [1, *range(94, 102)] and missed == 92 and events[-1] == ("end", {})


def test_the_rounds_of_all_requests_or_of_one(running: Running) -> None:
    everything: list[str] = []
    mine: list[str] = []

    def watch(path: str, into: list[str]) -> threading.Thread:
        ready = threading.Event()

        def go() -> None:
            with running.http.stream("GET", path) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                ready.set()
                into.extend(response.iter_text())

        thread = threading.Thread(target=go)
        thread.start()
        assert ready.wait(10)
        return thread

    all_of_them = watch("/dspark/rounds", everything)
    one = watch("/dspark/rounds?request=mine", mine)  # opened before the request comes
    other = running.chat(dspark={"events": True}).json()
    reply = running.chat(rid="mine", dspark={"events": True}, n=2).json()
    one.join(20)
    assert not one.is_alive()
    events = list(read("".join(mine)))
    assert reply["id"] == "mine" and events[-1] == ("end", {})
    assert [data for _, data in events[:-1]] == reply["dspark"]["rounds"]
    assert {data["request"] for _, data in events[:-1]} == {"mine/0", "mine/1"}
    wait(lambda: len(list(read("".join(everything)))) == len(other["dspark"]["rounds"]) + len(events) - 1)
    running.jobs.stop()
    all_of_them.join(20)
    assert list(read("".join(everything)))[-1] == ("end", {})
    late = list(read(running.http.get("/dspark/rounds?request=mine").text))
    assert late == events


def test_a_snapshot_says_what_goes_on(serve: Callable[..., Running], fake: ModuleType) -> None:
    running = serve(fake.FakeEngine(sleep_s=0.01))
    empty = running.http.get("/dspark/snapshot").json()
    assert empty["queue"] == [] and empty["running"] is None and empty["last_rounds"] == []
    assert empty["totals"]["mean_accepted_length"] is None and empty["engine"]["engine"] == "fake"
    rounds = []
    for mode in ("plain", "dspark"):
        reply = running.chat(rid="r", max_tokens=60, dspark={"mode": mode, "events": True}).json()
        rounds += [Round.from_dict(r) for r in reply["dspark"]["rounds"]]
    after = running.http.get("/dspark/snapshot").json()
    summary, totals = summarise(rounds), after["totals"]
    for name in ("tokens", "rounds", "drafted", "scheduled", "accepted"):
        assert totals[name] == getattr(summary, name), name
    drafting = [r for r in rounds if r.drafted]
    assert totals["mean_accepted_length"] == summarise(drafting).mean_accepted_length and totals["answered"] == 2
    assert after["last_rounds"] == [json.loads(json.dumps(asdict(r))) for r in rounds[-32:]]
    thread = threading.Thread(target=running.chat, kwargs={"rid": "now", "max_tokens": 400})
    thread.start()
    wait(lambda: (running.http.get("/dspark/snapshot").json()["running"] or {}).get("id") == "now")
    thread.join(20)
