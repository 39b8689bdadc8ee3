import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from local_runner.cli import app
from ui import command

runner = CliRunner()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page would have been served with."""
    served: dict[str, Any] = {}

    def application(service: Any, settings: Any, **given: Any) -> Any:
        served.update(source=service.source, settings=settings, service=service, **given)
        return "app"

    def serve(app: Any, service: Any, listening: socket.socket, **given: Any) -> None:
        served.update(address=listening.getsockname(), **given)
        listening.close()
        service.close()

    monkeypatch.setattr(command, "_needed", lambda: application)
    monkeypatch.setattr(command, "_serve", serve)
    return served


def test_by_default_it_is_local_on_a_free_port(quiet: dict[str, Any]) -> None:
    assert runner.invoke(app, ["demo"]).exit_code == 0
    assert quiet["address"][0] == "127.0.0.1" and quiet["address"][1] > 0
    assert quiet["local"] is True and quiet["share"] is False and quiet["auth"] is None and quiet["replay"] is None
    assert quiet["remote"] is False
    assert quiet["source"].name == "local" and quiet["settings"].max_new_tokens == 128


def test_settings_and_sources(quiet: dict[str, Any], recorded: Path) -> None:
    arguments = ["demo", "--pair", "smollm2-135m", "--dtype", "float32", "--threads", "3", "--auth", "ada:pass:word"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert (quiet["settings"].pair, quiet["settings"].threads, quiet["auth"]) == ("smollm2-135m", 3, "ada:pass:word")
    assert runner.invoke(app, ["demo", "--server", "http://127.0.0.1:1/", "--host", "0.0.0.0"]).exit_code == 0
    assert quiet["source"].name == "http://127.0.0.1:1" and quiet["local"] is False and quiet["remote"] is True
    assert runner.invoke(app, ["demo", "--replay", str(recorded)]).exit_code == 0
    run = quiet["service"].find(quiet["replay"])
    assert run.after()[0]["type"] == "run" and run.done.is_set()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--auth", "ada"], "--auth needs a user and a password"),
        (["--auth", ":secret"], "--auth needs a user and a password"),
        (["--server-plain", "http://x"], "--server-plain stands beside --server"),
        (["--server", "http://x", "--replay", "x.jsonl"], "both a source of rounds"),
        (["--replay", "missing.jsonl"], "missing.jsonl"),
        (["--host", "203.0.113.7"], "cannot be served at 203.0.113.7, port 0 (Cannot assign requested address);"),
        (["--pair", "smollm"], "There is no pair 'smollm'"),
        (["--pair", "smollm2-135m", "--target", "x"], "--pair already names a target"),
        (["--schedule", "soon"], "soon"),
        (["--temperature", "-1"], "'temperature' must be a number from 0 to 5"),
    ],
)
def test_what_cannot_be_is_one_sentence(quiet: dict[str, Any], arguments: list[str], says: str) -> None:
    result = runner.invoke(app, ["demo", *arguments])
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_said(quiet: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = runner.invoke(app, ["demo", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2 and "choose another --host or --port" in result.stderr


def test_a_missing_gradio_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gradio.py").write_text("raise ModuleNotFoundError('none', name='gradio')")
    done = subprocess.run(
        [sys.executable, "-m", "ui", "--no-browser"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert done.stderr == "Error: The page needs Gradio; run pip install 'sglang-dspark[ui]'.\n"


def test_help_needs_neither_gradio_nor_torch() -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom local_runner.cli import app\n"
        "assert '--replay' in CliRunner().invoke(app, ['demo', '--help']).stdout\n"
        "print(sorted({'gradio', 'torch', 'fastapi', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_the_browser_opens_on_a_desktop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSH_CONNECTION", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not command._desktop()
    monkeypatch.setenv("DISPLAY", ":0")
    assert command._desktop()
    monkeypatch.setenv("SSH_CONNECTION", "1.2.3.4 5 6 7")
    assert not command._desktop()
