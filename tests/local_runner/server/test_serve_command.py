"""`dspark serve` as a program: what it says, what it refuses, how it ends; and the default pair behind it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from local_runner.cli import app
from local_runner.pairs import DEFAULT_PAIR
from local_runner.serve_command import bind
from local_runner.store import resolve_pair
from sglang_dspark.errors import InputError

from .conftest import user, wait

ROOT = Path(__file__).parents[3]
Start = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(program, …): a process that serves on a free port, and its address."""
    with ExitStack() as stack:

        def go(*program: object) -> tuple[subprocess.Popen[str], str]:
            log = stack.enter_context((tmp_path / "log").open("w"))
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *map(str, program)], stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
                )
            )
            stack.callback(process.kill)
            said = tmp_path / "log"
            wait(lambda: process.poll() is not None or "Serving" in said.read_text(), 120)
            found = re.search(r"http://\S+(?=/v1)", said.read_text())
            assert found, said.read_text()
            return process, found[0]

        yield go


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow)]
)
def test_it_ends_at_the_next_round(
    start: Start, fake_program: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    process, url = start(fake_program, "--sleep-s", 0.02, "serve", "--port", 0, "--max-new-tokens", 100_000)
    with (
        httpx.stream("GET", f"{url}/dspark/rounds", timeout=30, trust_env=False) as rounds,
        httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={"messages": [user("hi")], "stream": True}, timeout=30,
            trust_env=False,
        ) as response,
    ):  # fmt: skip
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        began = time.monotonic()
        process.send_signal(sent)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"abort"' in rest[-2]
        assert "event: end" in list(rounds.iter_lines())
    assert process.wait(20) == code and time.monotonic() - began < 15
    assert process.stdout is not None and process.stdout.read() == ""
    assert "Traceback" not in (tmp_path / "log").read_text()


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_what_cannot_be_served_is_refused_before_anything_is_read(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from local_runner import options

    def never(*_: Any) -> Any:
        raise AssertionError("models were looked for")

    fake.install(fake.FakeEngine(), monkeypatch)
    monkeypatch.setattr(options, "_paths", never)
    assert "--api-key KEY" in refused("--host", "0.0.0.0", "--port", 0)
    assert "--api-key" in refused("--api-key", " ")
    assert "no.such.host.invalid" in refused("--host", "no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot be bound" in refused("--port", taken.getsockname()[1])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "sglang-dspark[serve]" in refused()


@pytest.mark.parametrize("more", [("--no-auth",), ("--api-key", "secret")])
def test_other_machines_are_served_where_that_is_said(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """As far as opening the models, which come after that question."""
    from local_runner import serve_command

    def opened(*_: Any, **__: Any) -> Any:
        raise InputError("Far enough.")

    monkeypatch.setattr(serve_command, "open_engine", opened)
    assert refused("--host", "0.0.0.0", "--port", 0, *more) == "Error: Far enough.\n"


def test_bind_tells_loopback_from_the_rest() -> None:
    for host, local in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        listener, found = bind(host, 0)
        listener.close()
        assert found is local, host


def test_help_needs_no_server() -> None:
    """`dspark --help` reads neither the web framework nor the engine."""
    code = "import sys, local_runner.serve_command; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "uvicorn", "starlette", "local_runner.server"} & set(done.stdout.split())


@pytest.mark.slow
def test_the_default_pair_says_what_generate_says(start: Start) -> None:
    try:
        resolve_pair(DEFAULT_PAIR)
    except InputError as error:
        pytest.skip(f"the default pair is not here: {error}")
    prompt, length = "Name three things that float, and say why.", 40
    generate = [
        sys.executable,
        "-m",
        "local_runner.cli",
        "generate",
        "--prompt",
        prompt,
        "--max-new-tokens",
        str(length),
        "--engine",
        "torch",
    ]
    said = subprocess.run(generate, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ).stdout
    # What the runner would choose by itself depends on the machine.
    given = ["--max-new-tokens", length, "--engine", "torch", "--schedule", "algorithm1"]
    _, url = start("-c", "from local_runner.cli import main; main()", "serve", "--port", 0, *given)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    asked: dict[str, Any] = {"model": DEFAULT_PAIR, "messages": [user(prompt)]}
    whole = client.chat.completions.create(**asked)
    assert f"{whole.choices[0].message.content}\n" == said and len(said) > 40
    assert whole.model_extra is not None and whole.model_extra["dspark"]["summary"]["drafted"] > 0
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) + "\n" == said
    plain = client.chat.completions.create(**asked, extra_body={"dspark": {"mode": "plain"}})
    assert f"{plain.choices[0].message.content}\n" == said
