"""The engine and the command line reproduce the reference's recorded greedy runs, round for round, in float32."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from local_runner.cli import app
from local_runner.engines import loop
from local_runner.engines.base import Request
from local_runner.engines.torch import TorchEngine
from local_runner.engines.torch.target import LeanTarget, TransformersTarget
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed, Schedule, Threshold

FOLDERS = ("qwen3-vanilla", "qwen3-gated", "qwen3-rnn", "qwen3-dflash", "gemma4-vanilla")
TOLERANCE = 1e-4

Load = Callable[..., TorchEngine]


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, golden: Path) -> Path:
    return golden / str(request.param)


@pytest.fixture(scope="module")
def engine(folder: Path, load: Load) -> TorchEngine:
    return load(folder / "target", folder / "draft", context_length=200)


def recorded(folder: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((folder / "golden.json").read_text())
    return runs


def request(run: dict[str, Any], schedule: Schedule | None) -> Request:
    # The reference goes on while the anchor stands before the end, so it makes one token more than it was asked for.
    return Request(tuple(run["prompt"]), run["max_new_tokens"] + 1, SamplingParams(), schedule=schedule)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def check(run: dict[str, Any], rounds: list[Round]) -> None:
    """Assert that decoded `rounds` are those of a recorded run."""
    prefill, after = rounds[0], rounds[1:]
    assert (prefill.index, prefill.position, prefill.drafted) == (0, len(run["prompt"]) - 1, ())
    assert len(after) == len(run["rounds"])
    for ours, theirs in zip(after, run["rounds"], strict=True):
        assert {
            "start": ours.position,
            "anchor": ours.anchor,
            "drafted_full": list(ours.drafted),
            "scheduled": ours.scheduled,
            "accepted": ours.accepted,
            "next_token": ours.next_token,
        } == {k: v for k, v in theirs.items() if k != "confidence_logits"}
        assert [logit(c) for c in ours.confidence] == pytest.approx(theirs["confidence_logits"] or [], abs=TOLERANCE)
    tokens = [t for r in rounds for t in r.committed]
    assert len(tokens) == run["max_new_tokens"] + 1
    assert tokens[: run["max_new_tokens"]] == run["output"]
    assert [r.stop for r in rounds] == [None] * (len(rounds) - 1) + ["length"]


@pytest.fixture(params=[256, 3, 1])
def prefill_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(loop, "PREFILL_CHUNK", request.param)
    yield request.param


def test_golden_runs(folder: Path, engine: TorchEngine, prefill_chunk: int) -> None:
    """One of the prompts is a single token, and some runs have a confidence threshold."""
    for run in recorded(folder):
        check(run, list(engine.generate(request(run, Threshold(run["confidence_threshold"])))))


def test_plain_decoding_makes_the_golden_output(folder: Path, engine: TorchEngine, load: Load) -> None:
    alone = load(folder / "target", context_length=200)
    for run in recorded(folder):
        for one in (engine, alone):
            rounds = list(one.generate(request(run, None)))
            assert [t for r in rounds for t in r.committed][:-1] == run["output"]
            assert all(len(r.committed) == 1 and r.drafted == () for r in rounds)


def test_a_smaller_block_makes_the_golden_output(folder: Path, load: Load) -> None:
    """Fewer rows see each other, so drafts may differ, but the output may not."""
    engine = load(folder / "target", folder / "draft", context_length=200, block=3)
    accepted = 0
    for run in recorded(folder):
        rounds = list(engine.generate(request(run, Fixed())))
        assert [t for r in rounds for t in r.committed][:-1] == run["output"]
        assert {len(r.drafted) for r in rounds[1:]} == {3}
        accepted += sum(r.accepted for r in rounds)
    assert accepted > 0


def test_each_pair_runs_where_it_should(folder: Path, engine: TorchEngine) -> None:
    expected = TransformersTarget if folder.name.startswith("gemma4") else LeanTarget
    assert type(engine.target) is expected
    assert engine.block == (5 if folder.name == "qwen3-gated" else 7)


def command(folder: Path, run: dict[str, Any], events: Path) -> list[str]:
    options = {
        "--target": folder / "target",
        "--draft": folder / "draft",
        "--prompt-ids": ",".join(map(str, run["prompt"])),
        "--max-new-tokens": run["max_new_tokens"] + 1,
        "--confidence-threshold": run["confidence_threshold"],
        "--dtype": "float32",
        "--device": "cpu",
        "--threads": 1,
        "--context-length": 200,
        "--events": events,
    }
    return ["generate", *(str(x) for pair in options.items() for x in pair)]


def check_output(run: dict[str, Any], stdout: str, events: Path) -> None:
    assert stdout.strip().split(",")[:-1] == [str(t) for t in run["output"]]
    check(run, [Round.from_dict(json.loads(line)) for line in events.read_text().splitlines()])


def test_the_command_line_writes_the_golden_rounds(folder: Path, tmp_path: Path) -> None:
    for number, run in enumerate(recorded(folder)):
        events = tmp_path / f"{number}.jsonl"
        result = CliRunner().invoke(app, command(folder, run, events))
        assert result.exit_code == 0, result.output
        check_output(run, result.stdout, events)


@pytest.mark.slow
def test_the_program_writes_the_golden_rounds(golden: Path, tmp_path: Path) -> None:
    """As a process of its own, which says nothing but the answer and what it reads."""
    folder, events = golden / "qwen3-vanilla", tmp_path / "events.jsonl"
    run = recorded(folder)[3]
    program = [sys.executable, "-m", "local_runner.cli", *command(folder, run, events)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["Reading the target target", "Reading the draft draft"]
    check_output(run, done.stdout, events)


def test_taps_one_layer_below_are_noticed(folder: Path, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.target, "taps", tuple(k - 1 for k in engine.target.taps))
    run = recorded(folder)[0]
    with pytest.raises(AssertionError):
        check(run, list(engine.generate(request(run, Fixed()))))
