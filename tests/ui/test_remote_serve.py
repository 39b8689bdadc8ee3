"""The page on `dspark serve` as it is, on the scripted engine."""

import asyncio
import runpy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from local_runner.engine import Decoding
from local_runner.options import Settings
from local_runner.serve_command import bind
from local_runner.server.app import make_app
from local_runner.server.jobs import Jobs
from local_runner.server.protocol import Served
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed
from sglang_dspark.errors import InputError
from ui.ask import Ask
from ui.messages import LANES, Lane, lane_rounds, lane_text
from ui.remote import Remote
from ui.server import Texts
from ui.service import Run

FAKE = runpy.run_path(str(Path(__file__).with_name("fake_demo.py")))["fake_engine"]


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never"
        time.sleep(0.01)


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, Jobs]]]:
    """serve(engine, …): the address and the queue of a server that runs until the test is over."""
    with ExitStack() as stack:

        def start(engine: Any, **options: Any) -> tuple[str, Jobs]:
            decoding = Decoding(12, SamplingParams(), Fixed())
            jobs = stack.enter_context(
                Jobs(Served(engine, "fake-pair", decoding, "dspark" if engine.block else "plain"))
            )
            listener, _ = bind("127.0.0.1", 0)
            config = uvicorn.Config(make_app(jobs, **options), log_config=None, lifespan="off")
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()

            def stop() -> None:
                jobs.stop()
                server.should_exit = True
                thread.join(20)

            stack.callback(stop)
            until(lambda: server.started)
            return f"http://127.0.0.1:{listener.getsockname()[1]}", jobs

        yield start


def ask(kind: Any = "race", *, plain: bool = False, **settings: Any) -> Run:
    made = Settings(**{"max_new_tokens": 24, **settings})
    return Run(Ask(kind, made, ({"role": "user", "content": "Tell me of the sea."},), plain=plain))


def test_both_lanes_are_the_servers_rounds(serve: Callable[..., tuple[str, Jobs]]) -> None:
    url, jobs = serve(FAKE())
    run = ask()
    Remote(url).run(run)
    messages = run.after()
    own = [e.round for e in jobs.feed.after(0)]
    for lane in LANES:
        rounds = lane_rounds(messages, lane)
        assert rounds and rounds == [r for r in own if r.request == f"{run.id}-{lane}"]
    assert lane_text(messages, "plain") == lane_text(messages, "dspark")
    assert len(lane_rounds(messages, "plain")) == 24 > len(lane_rounds(messages, "dspark"))
    assert (messages[0]["pair"], messages[0]["engine"], messages[0]["dtype"]) == ("fake-pair", "fake", "float32")
    assert messages[-1]["identical"] is True
    # The scripted engine says 20 ms a plain round and 31 ms a drafted one, whatever they took.
    drafted = lane_rounds(messages, "dspark")[1:]
    tokens_per_s = sum(len(r.committed) for r in drafted) / (0.031 * len(drafted))
    assert messages[-1]["speedup"] == pytest.approx(tokens_per_s * 0.020)


def test_a_difference_is_found_by_its_token(serve: Callable[..., tuple[str, Jobs]]) -> None:
    url, _ = serve(FAKE(flip=9))
    run = ask()
    Remote(url).run(run)
    assert run.after()[-1]["first_difference"]["position"] == 9


@pytest.mark.parametrize("plain", [False, True])
def test_a_chat_is_answered_either_way(serve: Callable[..., tuple[str, Jobs]], plain: bool) -> None:
    url, _ = serve(FAKE())
    run = ask("chat", plain=plain)
    Remote(url).run(run)
    lane: Lane = "plain" if plain else "dspark"
    assert {m["lane"] for m in run.after() if m["type"] == "round"} == {lane}
    assert any(r.drafted for r in lane_rounds(run.after(), lane)) is not plain


def test_the_machine_tab_tells_of_the_servers_engine(serve: Callable[..., tuple[str, Jobs]]) -> None:
    url, _ = serve(FAKE())
    run = ask("machine")
    Remote(url).run(run)
    assert run.after()[-1]["values"]["engine"]["engine"] == "fake"


def test_what_the_server_refuses_is_said_in_its_words(serve: Callable[..., tuple[str, Jobs]]) -> None:
    url, _ = serve(FAKE(block=0))
    with pytest.raises(InputError, match="this server has no draft; serve a pair"):
        Remote(url).run(ask("chat"))


def test_a_key_is_asked_for_and_given(serve: Callable[..., tuple[str, Jobs]]) -> None:
    url, _ = serve(FAKE(), api_key="open sesame")
    with pytest.raises(InputError, match="API key is missing"):
        Remote(url).run(ask("chat"))
    run = ask("chat")
    Remote(url, key="open sesame").run(run)
    assert lane_rounds(run.after(), "dspark")


def test_a_run_that_waits_on_the_server_is_cancelled_there(serve: Callable[..., tuple[str, Jobs]]) -> None:
    url, jobs = serve(FAKE(sleep_s=0.05))
    runs = [ask("chat", max_new_tokens=2000), ask("chat")]
    threads = [threading.Thread(target=Remote(url).run, args=(run,)) for run in runs]
    threads[0].start()
    until(lambda: jobs.snapshot()["running"])
    threads[1].start()
    until(lambda: jobs.snapshot()["queue"])
    for at in (1, 0):
        runs[at].cancelled.set()
        threads[at].join(20)
        assert not threads[at].is_alive()
    until(lambda: not jobs.snapshot()["queue"] and not jobs.snapshot()["running"])
    assert jobs.snapshot()["totals"]["cancelled"] == 2


class Bytes:
    """A server whose tokens are the bytes of UTF-8."""

    async def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(ids).decode("utf-8", "replace") for ids in tokens]


def test_characters_that_span_tokens_come_whole() -> None:
    text = "바다 🌊👩‍🚀 é\ufffd fin"
    texts = Texts(Bytes())  # type: ignore[arg-type]
    pieces: list[str] = []
    ghosts: list[list[str]] = []
    every = list(text.encode())
    for index, at in enumerate(range(0, len(every), 3)):
        committed = tuple(every[at : at + 3])
        drafted = (*committed[:-1], *every[at + 2 : at + 5])
        round_ = Round(
            "r", index, at, 0, drafted, (), len(committed) - 1, len(committed) - 1, committed[-1], committed, None, 0, 0
        )
        made, ghost = asyncio.run(texts.of(round_))
        assert len(made) == len(committed) and len(ghost) == len(drafted)
        pieces += made
        ghosts.append(ghost)
    assert "".join(pieces) == text
    assert all("\ufffd" not in "".join(g) for g in ghosts[:5])
    assert pieces[:3] == ["", "", "바"]
