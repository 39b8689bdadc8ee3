"""Rounds reach those who listen, late ones too, and the model never waits."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.serving import channel
from sglang_dspark.serving.watch import Watch


def round_(request: str, index: int, stop: str | None = None) -> Round:
    return Round(request, index, index, 0, (1,), (), 1, 1, 2, (1, 2), stop, 0.0, 0.0)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[channel.Publisher]:
    # A socket's path may have no more than about a hundred characters.
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="dspark-"))
    made = channel.Publisher(folder, 0, lambda: {"rounds": 3})
    made.folder = folder  # type: ignore[attr-defined]
    yield made
    shutil.rmtree(folder)


def events(text: list[str]) -> list[tuple[str, Any]]:
    found = []
    for event in text:
        lines = dict(line.split(": ", 1) for line in event.strip().splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines.get("event", "round"), json.loads(lines["data"])))
    return found


async def until(stream: AsyncIterator[str], count: int, seconds: float = 10) -> list[str]:
    got: list[str] = []
    async with asyncio.timeout(seconds):
        async for text in stream:
            got.append(text)
            if len(events(got)) >= count:
                break
    return got


def test_one_request_from_its_first_round_to_its_last(publisher: Any) -> None:
    for r in (round_("ab", 0), round_("a", 0), round_("a", 1)):
        publisher.put(r)
    watch = Watch(publisher.folder, 1)

    async def both() -> list[list[str]]:
        tasks = [asyncio.create_task(until(watch.events("a"), 9)) for _ in range(2)]
        other = asyncio.create_task(until(watch.events("ab"), 3))
        await asyncio.sleep(0.5)
        for r in (round_("ab", 1), round_("a", 2), round_("a", 3, "eos"), round_("ab", 2)):
            publisher.put(r)
        assert [d["request"] for _, d in events(await other)] == ["ab"] * 3
        return list(await asyncio.gather(*tasks))

    for got in asyncio.run(both()):
        seen = events(got)
        assert [(n, d.get("request"), d.get("index")) for n, d in seen[:-1]] == [("round", "a", i) for i in range(4)]
        assert seen[-1] == ("end", {})
    assert (watch.listeners, watch.dropped) == (0, 0)


def test_all_requests_from_now_on(publisher: Any) -> None:
    publisher.put(round_("old", 0))
    watch = Watch(publisher.folder, 1)

    async def listen() -> list[str]:
        task = asyncio.create_task(until(watch.events(None), 3))
        await asyncio.sleep(0.5)
        for r in (round_("old", 1), round_("x", 0), round_("old", 2)):
            publisher.put(r)
        return await task

    assert [(d["request"], d["index"]) for _, d in events(asyncio.run(listen()))] == [("old", 1), ("x", 0), ("old", 2)]


def test_what_was_lost_is_counted(publisher: Any) -> None:
    watch = Watch(publisher.folder, 1)

    async def listen() -> list[str]:
        task = asyncio.create_task(until(watch.events("a"), 3))
        await asyncio.sleep(0.5)
        publisher.put(round_("a", 0))
        publisher.put(round_("a", 3))
        return await task

    assert [(n, d.get("index", d.get("rounds"))) for n, d in events(asyncio.run(listen()))] == [
        ("round", 0), ("dropped", 2), ("round", 3),
    ]  # fmt: skip
    assert watch.dropped == 2


def test_nothing_waits_and_nothing_is_sent_when_nobody_listens(publisher: Any) -> None:
    for n in range(3 * channel.KEPT):
        publisher.put(round_("a", n))
    assert publisher._waiting.empty() and len(publisher._kept) == channel.KEPT and publisher.dropped == 0


def test_a_full_queue_drops_and_does_not_block(publisher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(channel, "_send", lambda *args: stuck.wait())
    publisher._topics[channel.ALL] = 1
    start = time.monotonic()
    for n in range(channel.KEPT + 100):
        publisher.put(round_("a", n))
    assert time.monotonic() - start < 5
    assert publisher.dropped > 0
    stuck.set()


def test_a_snapshot_and_its_absence(publisher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asyncio.run(Watch(publisher.folder, 1).snapshot())
    assert found["workers"] == [{"rounds": 3, "dropped": 0}]
    monkeypatch.setattr(channel, "SNAPSHOT_S", 0.2)
    with pytest.raises(TimeoutError):
        asyncio.run(Watch(publisher.folder, 2).snapshot())
