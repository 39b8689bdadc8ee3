"""A server whose host runs short of memory cuts answers short, says so, and goes on once there is memory again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from local_runner import watchdog
from local_runner.machine.memory import ROOT

Serve = Callable[..., Any]


class Host:
    """Says what the watchdogs find: nothing for `calm` looks, then trouble until it is told otherwise."""

    def __init__(self) -> None:
        self.calm = 1 << 30
        self.looks = 0

    def trouble(self, dog: watchdog.Watchdog) -> str:
        self.looks += 1
        return "" if self.looks <= self.calm else "1 MiB of memory are left"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, engine: Any) -> Host:
    made = Host()
    monkeypatch.setattr(watchdog.Watchdog, "_trouble", lambda dog: made.trouble(dog))
    monkeypatch.setattr(watchdog.Watchdog.__init__, "__kwdefaults__", {"root": ROOT, "every_s": 0.05})
    engine.sleep_s = 0.02
    return made


def test_an_answer_is_kept_as_far_as_it_came_and_marked(serve: Serve, engine: Any, host: Host) -> None:
    host.calm = 4
    response = serve(engine).chat(max_tokens=2000)
    body = response.json()
    assert response.status_code == 200 and body["choices"][0]["finish_reason"] == "abort"
    assert body["choices"][0]["message"]["content"] and 0 < body["usage"]["completion_tokens"] < 2000
    assert body["dspark"]["cut_short"].startswith("Stopped: 1 MiB of memory are left")


def test_a_stream_says_so_at_its_end(serve: Serve, engine: Any, host: Host) -> None:
    host.calm = 4
    lines = [line for line in serve(engine).chat(max_tokens=2000, stream=True).text.splitlines() if line]
    last = json.loads(lines[-2].removeprefix("data: "))
    assert lines[-1] == "data: [DONE]" and last["choices"][0]["finish_reason"] == "abort"
    assert "1 MiB of memory" in last["dspark"]["cut_short"]


def test_no_answer_begins_without_memory_and_the_next_one_does_with_it(serve: Serve, engine: Any, host: Host) -> None:
    server = serve(engine)
    host.calm = 0
    response = server.chat(max_tokens=5)
    assert response.status_code == 503 and not engine.requests
    assert response.json()["error"]["code"] == "out_of_memory" and "1 MiB" in response.json()["error"]["message"]
    host.calm = 1 << 30
    response = server.chat(max_tokens=5)
    assert response.status_code == 200 and "cut_short" not in response.json()["dspark"]
