"""The server on a free port of 127.0.0.1, in a thread, on an engine of the test's choice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from local_runner.engine import Decoding
from local_runner.serve_command import bind
from local_runner.server.app import make_app
from local_runner.server.jobs import Jobs
from local_runner.server.protocol import Served
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed


@dataclass
class Running:
    """A server, and clients for it."""

    url: str
    jobs: Jobs
    server: uvicorn.Server
    http: httpx.Client
    client: openai.OpenAI

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [user("hi")], **body})


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def wait(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """serve(engine, …): a server that runs until the test is over."""
    with ExitStack() as stack:

        def start(engine: Any, *, most_waiting: int = 64, decoding: Decoding | None = None, **options: Any) -> Running:
            decoding = decoding or Decoding(12, SamplingParams(), Fixed())
            mode = "dspark" if engine.block else "plain"
            jobs = stack.enter_context(Jobs(Served(engine, "fake-pair", decoding, mode), most_waiting=most_waiting))  # type: ignore[arg-type]
            listener, _ = bind("127.0.0.1", 0)
            app = make_app(jobs, **options)
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()

            def stop() -> None:
                jobs.stop()
                server.should_exit = True
                thread.join(20)
                assert not thread.is_alive()

            stack.callback(stop)
            wait(lambda: server.started)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            http = stack.enter_context(httpx.Client(base_url=url, timeout=30, trust_env=False))
            client = openai.OpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30,
                http_client=stack.enter_context(openai.DefaultHttpxClient(trust_env=False)),
            )  # fmt: skip
            return Running(url, jobs, server, http, client)

        yield start


@pytest.fixture
def engine(fake: ModuleType) -> Any:
    """The scripted engine, with a tokenizer that can be called."""
    return fake.FakeEngine(tokenizer=lambda text: {"input_ids": [len(word) for word in text.split()]})


@pytest.fixture
def running(serve: Callable[..., Running], engine: Any) -> Running:
    """A server on it."""
    return serve(engine)
