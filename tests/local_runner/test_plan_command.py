"""`dspark plan`, its JSON, its pictures, and the plans that are stored."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from local_runner import plan_command
from local_runner.cli import Program
from local_runner.footprint.shapes import published
from local_runner.machine import load_machine
from local_runner.placement import place
from local_runner.placement.items import Wishes
from local_runner.plan_view import WIDTH, bar, ranges, rows, sentence, shares, view

app = typer.Typer(cls=Program)
app.command()(plan_command.plan)


@app.command()
def other() -> None:
    """With two commands the first keeps its name."""


STORED = Path(__file__).parents[2] / "results" / "plans"


def dspark(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSPARK_HOME", "XDG_CONFIG_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))


def test_a_known_pair_on_a_known_machine() -> None:
    result = dspark("--pair", "qwen3-4b", "--machine", "dgx-spark")
    assert result.exit_code == 0, result.output
    assert "fits on dgx-spark" in result.stdout and "target layers 0–35" in result.stdout
    assert "read 7 times a round" in result.stdout and "frees nothing" in result.stdout
    assert "From published shapes" in result.stdout


def test_json_is_the_whole_of_standard_output() -> None:
    result = dspark(
        "--pair", "qwen3-4b", "--machine", "h200", "--users", 8, "--throughput", "--context", 4096, "--json"
    )
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["fits"] and data["verify_rows"] == 64
    assert data["wishes"]["users"] == 8 and data["wishes"]["goal"] == "throughput"
    assert sum(p["bytes"] for p in data["parts"]) == sum(p["used"] for p in data["pools"])
    assert data["step_s"] == pytest.approx(sum(p["plain_s"] for p in data["parts"]))
    assert data["round_s"] / data["step_s"] == pytest.approx(data["break_even_accepted_length"])


def test_what_does_not_fit_is_exit_code_1_with_what_would() -> None:
    result = dspark("--pair", "qwen3-14b", "--machine", "macbook-32gb")
    assert result.exit_code == 1
    assert "does not fit" in result.stderr and "What would fit" in result.stdout and "bits a weight" in result.stdout
    data = json.loads(dspark("--pair", "qwen3-14b", "--machine", "macbook-32gb", "--json").stdout)
    assert not data["fits"] and data["parts"] == [] and data["changes"] and data["round_s"] is None


def test_a_target_alone_has_no_round() -> None:
    data = json.loads(dspark("--target", "qwen3-4b", "--machine", "dgx-spark", "--json").stdout)
    assert data["draft"] is None and data["round_s"] is None and data["step_s"] > 0
    both = json.loads(dspark("--target", "qwen3-4b", "--draft", "qwen3-4b", "--machine", "dgx-spark", "--json").stdout)
    assert both["block"] == 7


def test_types_can_be_chosen() -> None:
    def used(*more: str) -> int:
        data = json.loads(dspark("--pair", "qwen3-4b", "--machine", "dgx-spark", "--json", *more).stdout)
        return int(data["pools"][0]["used"])

    plain = used()
    assert used("--cache-dtype", "int8") < plain and used("--head-dtype", "int8") < plain
    assert used("--dtype", "float32") > plain + 8e9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pair", "qwen3-4b", "--target", "x"), "--pair already names"),
        (("--draft", "qwen3-4b"), "--draft needs a target"),
        (("--pair", "qwen3-4b", "--machine", "dgx-sparc"), "dgx-spark"),
        (("--target", "qwen3-4b", "--draft", "elsewhere", "--machine", "h200"), "published shape"),
        (("--target", "./nothing-here"), "There is no folder"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    result = dspark(*arguments)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1


def test_bars_show_everything_that_is_there() -> None:
    plan = place(load_machine("rtx-4090-64gb"), published("qwen3-14b"), Wishes())
    for use in plan.uses:
        found = shares(plan, use)
        assert sum(size for _, size in found) == use.size
        text = bar(plan, use)
        assert len(text.plain) == WIDTH and len(set(text.plain)) == len(found)


def test_rows_are_layers_together() -> None:
    plan = place(load_machine("rtx-4090-64gb"), published("qwen3-14b"), Wishes())
    found = {row.part: row.pool for row in rows(plan)}
    assert found["target layers 0–24"] == "gpu" and found["target layers 25–39"] == "system"
    assert found["caches 0–24"] == "gpu"
    assert sum(row.bytes for row in rows(plan)) == sum(p.bytes for p in plan.placed)
    assert ranges([0, 1, 2, 7, 9, 10]) == "0–2, 7, 9–10"


def test_a_round_that_cannot_pay_is_said() -> None:
    """On a machine whose experts are far away, eight rows read more of them than eight single ones."""
    plan = place(load_machine("rtx-4090-64gb"), published("qwen3-30b-a3b"), Wishes())
    assert plan.break_even is not None and 5 < plan.break_even < 8
    assert "pays from an accepted length of 5.40" in sentence(plan)


def test_the_view_names_no_control_codes_on_a_pipe() -> None:
    out = StringIO()
    plan = place(load_machine("dgx-spark"), published("gemma-4-12b"), Wishes())
    Console(file=out, width=160).print(view(plan))
    assert "\x1b" not in out.getvalue() and "work spaces" in out.getvalue()


def test_stored_plans_are_not_stale() -> None:
    plan_command.store(STORED, check=True)


def test_a_stale_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_command, "pages", lambda: {"m.md": "a page\n"})
    assert plan_command.main(["--store", str(tmp_path), "--check"]) == 1
    assert plan_command.main(["--store", str(tmp_path)]) == 0
    assert plan_command.main(["--store", str(tmp_path), "--check"]) == 0
    (tmp_path / "m.md").write_text("another page\n")
    assert plan_command.main(["--store", str(tmp_path), "--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    assert plan_command.main(["--check"]) == 2


@pytest.mark.slow
def test_the_default_pair_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from local_runner.doctor_command import place_of
    from sglang_dspark.errors import InputError

    try:
        place_of("smollm2-135m", is_draft=False, pull=False)
    except InputError as error:
        pytest.skip(f"the default pair is not here: {error}")
    data = json.loads(dspark("--json").stdout)
    assert data["target"].startswith("SmolLM2") and data["block"] == 7 and data["machine"] == "this machine"
