"""`dspark launch` prints, checks, and refuses; recipes mean what they say."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from local_runner import launch_command
from sglang_dspark.errors import InputError
from sglang_dspark.serving import launch as server

app = typer.Typer()
app.command(context_settings=launch_command.CONTEXT)(launch_command.launch)
GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))


def run(*words: str) -> Any:
    return CliRunner().invoke(app, words)


def test_a_dry_run_prints_the_command_with_what_it_does_not_know() -> None:
    got = run(
        "--target", "a/b", "--draft", "c/d", "--dry-run", "--port", "31000", "--tp-size=2", "--skip-server-warmup"
    )
    assert got.exit_code == 0, got.output
    words = shlex.split(got.stdout)
    assert words[1:3] == ["-m", "sglang.launch_server"]
    assert words[3:] == [
        *("--model-path", "a/b", "--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "c/d"),
        *("--port", "31000", "--tp-size=2", "--skip-server-warmup"),
    ]


def test_what_is_asked_for_wins_over_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[arguments]\nmodel-path = "x/y"\nspeculative-draft-model-path = "x/z"\ntp-size = 8\nenable-metrics = true\n'
        'trust-remote-code = false\n[environment]\nSGLANG_RAGGED_VERIFY_MODE = "compact"\n'
    )
    got = run("--recipe", str(file), "--target", "a/b", "--dry-run", "--tp-size", "2")
    words = shlex.split(got.stdout)
    assert words[0] == "SGLANG_RAGGED_VERIFY_MODE=compact"
    assert words[4:] == [
        *("--model-path", "a/b", "--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", "x/z"),
        *("--tp-size", "8", "--enable-metrics", "--tp-size", "2"),
    ]


def test_a_pair_on_a_hub_is_known_by_name() -> None:
    assert launch_command.of_pair("qwen3-4b", None) == ("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7")
    assert launch_command.of_pair("deepseek-v4-flash", None)[1] is None
    with pytest.raises(InputError, match="safetensors folders"):
        launch_command.of_pair("smollm2-135m", None)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("x = 1", "unknown key 'x'"),
        ("[arguments]\nport = [1]", "'port' must be"),
        ("arguments = 3", "tables"),
        ("= 3", "not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=complaint):
        server.read_recipe(file)
    with pytest.raises(InputError, match="cannot be read"):
        server.read_recipe(tmp_path / "absent.toml")


def test_another_algorithm_is_refused() -> None:
    with pytest.raises(InputError, match="DSPARK only"):
        server.prepare("a/b", "c/d", server.Recipe(), ["--speculative-algorithm", "NGRAM"], local=True)
    with pytest.raises(InputError, match="no target"):
        server.prepare(None, "c/d", server.Recipe(), [], local=True)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="The golden pairs are not here.")
def test_a_draft_for_another_target_is_refused() -> None:
    target = str(GOLDEN / "qwen3-vanilla" / "target")
    found = server.prepare(target, str(GOLDEN / "qwen3-vanilla" / "draft"), server.Recipe(), [], local=True)
    assert "block 7" in found.notes[0]
    with pytest.raises(InputError):
        server.prepare(target, str(GOLDEN / "qwen3-gated" / "draft"), server.Recipe(), [], local=True)


def test_without_sglang_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="make sglang"):
        server.check_sglang()


def test_it_becomes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(server, "check_sglang", lambda: "1.0")
    monkeypatch.setattr(os, "execvpe", lambda *given: became.extend(given))
    monkeypatch.setattr(server.drafts, "judge", lambda *given: pytest.fail("nothing is on this disk"))
    got = run("--target", "a/b", "--port", "1")
    assert got.exit_code == 0, got.output
    assert became[1][1:] == ["-m", "sglang.launch_server", "--model-path", "a/b", "--speculative-algorithm", "DSPARK",
                             "--port", "1"]  # fmt: skip
    assert "parts: " in got.stderr
