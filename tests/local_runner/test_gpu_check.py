"""Every part of the GPU check on the CPU, with tiny shapes: what is found wrong, and what a failing part leaves."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from local_runner.gpu_check import __main__ as command
from local_runner.gpu_check import costs as costs_module
from local_runner.gpu_check import numerics, parts
from local_runner.gpu_check.graphs import Capture, Captured, GraphedDraft
from local_runner.gpu_check.parts import Part, Result, Skipped, run_part, run_parts, succeeded
from local_runner.gpu_check.race import Models, pair_race
from local_runner.gpu_check.shapes import QWEN3_4B, QWEN3_8B, Shape, draft_config, random_pair
from local_runner.prompts import Prompt
from sglang_dspark.checkpoints.deepspec import OPTIONAL, expected_tensors
from sglang_dspark.errors import InputError

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
TINY = Shape("tiny", 64, 128, 4, 4, 2, 16, 192, False, (0, 1, 3), 2, 16)
CPU = torch.device("cpu")

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden runs at {GOLDEN}; set DSPARK_GOLDEN")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def eager_capture(run: Callable[[], tuple[Tensor, ...]]) -> Captured[tuple[Tensor, ...]]:
    """What a graph does, without one: replaying computes anew into the same tensors."""
    with torch.inference_mode():
        outputs = run()

    def replay() -> None:
        with torch.inference_mode():
            for kept, fresh in zip(outputs, run(), strict=True):
                kept.copy_(fresh)

    return Captured(replay, outputs)


def frozen_capture(run: Callable[[], tuple[Tensor, ...]]) -> Captured[tuple[Tensor, ...]]:
    """A faulty graph: it repeats what it saw when it was captured."""
    return Captured(lambda: None, eager_capture(run).outputs)


# Parts


def test_the_parts_after_a_failing_one_run_and_are_stored() -> None:
    def fails(result: Result) -> None:
        result["found"] = 1
        raise RuntimeError("the device fell off")

    def slow(result: Result) -> None:
        result["found"] = 2
        for _ in range(1000):
            time.sleep(0.005)

    def nothing(result: Result) -> None:
        raise Skipped("nothing to work on")

    def wrong(result: Result) -> None:
        result["checks"] = {"this": True, "that": False}

    def right(result: Result) -> None:
        result["checks"] = {"this": True}

    stored: list[list[str]] = []
    listed = [Part("fails", 9, fails), Part("slow", 0.05, slow), Part("nothing", 9, nothing)]
    listed += [Part("wrong", 9, wrong), Part("right", 9, right)]
    records = run_parts(listed, 60, lambda r: stored.append([*r]))
    assert [r["status"] for r in records.values()] == ["error", "out of time", "skipped", "failed", "passed"]
    assert records["fails"]["found"] == 1 and records["slow"]["found"] == 2
    assert records["fails"]["reason"] == "RuntimeError: the device fell off"
    assert records["slow"]["seconds"] < 2 and "in fails" in records["fails"]["traceback"]
    assert stored == [["fails", "slow", "nothing", "wrong", "right"][:n] for n in range(1, 6)]
    assert not succeeded(records)
    assert succeeded({name: records[name] for name in ("nothing", "right")})
    assert not any(succeeded({name: records[name]}) for name in ("fails", "slow", "wrong"))


def test_no_part_begins_after_the_time_of_all() -> None:
    def slow(result: Result) -> None:
        time.sleep(10)

    began = time.monotonic()
    records = run_parts([Part("a", 30, slow), Part("b", 30, slow)], 0.1, lambda r: None)
    assert time.monotonic() - began < 5
    assert [r["status"] for r in records.values()] == ["out of time"] * 2
    assert records["b"]["reason"] == "no time was left to begin"


def test_the_alarm_is_off_after_a_part() -> None:
    run_part(Part("quick", 0.2, lambda result: None), 0.2)
    time.sleep(0.3)  # an alarm that still rang would end the process


# Numerics


@needs_golden
@pytest.mark.slow
def test_recorded_runs_come_out() -> None:
    result: Result = {}
    numerics.golden_runs(result, CPU, GOLDEN)
    assert len(result["checks"]) == 5 and all(result["checks"].values())
    vanilla = result["qwen3-vanilla"]
    assert vanilla["problems"] == [] and vanilla["forward"] == "LeanTarget"
    assert vanilla["float32_mean_accepted_length"] > 1.5 and 0.3 < vanilla["bfloat16_agreement"] <= 1


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "drafted_full": lambda run: run["rounds"][1]["drafted_full"].reverse(),
    "accepted": lambda run: run["rounds"][1].update(accepted=run["rounds"][1]["accepted"] + 1),
    "confidence": lambda run: run["rounds"][1].update(
        confidence_logits=[c + 0.01 for c in run["rounds"][1]["confidence_logits"]]
    ),
    "rounds": lambda run: run["rounds"].append(run["rounds"][-1]),
    "output": lambda run: run["output"].reverse(),
}


@needs_golden
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_differs_is_named(fault: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "qwen3-vanilla", tmp_path / "pair", copy_function=shutil.copyfile)
    runs = json.loads((GOLDEN / "qwen3-vanilla" / "golden.json").read_text())[:1]
    FAULTS[fault](runs[0])
    (tmp_path / "pair" / "golden.json").write_text(json.dumps(runs))
    result: Result = {}
    numerics.golden_runs(result, CPU, tmp_path)
    assert not any(result["checks"].values())
    assert len(result["pair"]["problems"]) == 1 and fault in result["pair"]["problems"][0]


@needs_golden
def test_streams_repeat_and_a_part_without_runs_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numerics, "STREAM_TOKENS", 16)
    monkeypatch.setattr(numerics, "SEEDS", range(2))
    result: Result = {}
    numerics.sampled_streams(result, CPU, GOLDEN)
    assert len(result["checks"]) == 2 and all(result["checks"].values()) and result["streams_equal_to_cpu"] == 1
    with pytest.raises(Skipped):
        numerics.sampled_streams({}, CPU, None)
    with pytest.raises(InputError, match="holds no folder with"):
        numerics.sampled_streams({}, CPU, tmp_path)


@needs_golden
def test_a_stream_that_does_not_repeat_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(100))
    stream = numerics._stream
    monkeypatch.setattr(numerics, "STREAM_TOKENS", 16)
    monkeypatch.setattr(numerics, "_stream", lambda e, p, seed, drafts: stream(e, p, next(seeds), drafts))
    result: Result = {}
    numerics.sampled_streams(result, CPU, GOLDEN)
    assert not any(result["checks"].values()) and result["streams_equal_to_cpu"] == 0


def test_rules_of_acceptance_meet_all_outcomes_and_a_device_that_errs_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result: Result = {}
    numerics.acceptance_rules(result, CPU, 96, 64)
    assert len(result["checks"]) == 3 and all(result["checks"].values())
    assert all(0.2 < v < 3 for k, v in result.items() if k.startswith("mean accepted"))
    right = numerics.accept_sampled
    calls = iter([right, lambda *given: tuple(t + 1 for t in right(*given))])
    monkeypatch.setattr(numerics, "accept_sampled", lambda *given: next(calls)(*given))
    numerics.acceptance_rules(result, CPU, 96, 64)
    assert [name for name, met in result["checks"].items() if not met] == [
        "sampled acceptance chooses as on the CPU, vocabulary 96"
    ]


# Costs


@pytest.mark.parametrize(("shape", "gigabytes"), [(QWEN3_4B, 1.23), (QWEN3_8B, 2.25)])
def test_heads_have_the_published_sizes(shape: Shape, gigabytes: float) -> None:
    sizes = expected_tensors(draft_config(shape, 4096))
    own = sum(torch.Size(size).numel() for name, size in sizes.items() if name not in OPTIONAL)
    assert 2 * own / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_a_random_pair_counts_what_it_reads() -> None:
    pair = random_pair(TINY, CPU, torch.float32, 64)
    d, kv, vocab = 64, 32, 192
    layer = 2 * d * d + 2 * d * kv + 3 * d * 128 + 2 * d + 2 * 16
    assert pair.target_parameters == 4 * layer + vocab * d + d
    markov, confidence = vocab * 16, (d + 16) + 1
    assert pair.draft_parameters == 2 * layer + 3 * d * d + 2 * d + vocab * d + 7 * markov + confidence


@pytest.mark.parametrize("shape", [TINY, QWEN3_4B, QWEN3_8B])
def test_what_is_captured_stays_on_the_device_and_reads_nothing_back(shape: Shape) -> None:
    """Tensors of the device "meta" have no values to read, do not mix with others, and take no memory."""
    meta = torch.device("meta")
    pair = random_pair(shape, meta, torch.bfloat16, 300)

    def run_once(run: Callable[[], tuple[Tensor, ...]]) -> Captured[tuple[Tensor, ...]]:
        with torch.inference_mode():
            outputs = run()
        assert all(t.device == meta for t in outputs)
        return Captured(lambda: None, outputs)

    width = pair.draft.config.feature_size
    GraphedDraft(pair.draft, torch.empty(256, width, dtype=torch.bfloat16, device=meta), run_once)
    for rows in (1, 16):
        tokens = torch.zeros(rows, dtype=torch.long, device=meta)
        step = run_once(lambda tokens=tokens: pair.target.model(tokens, 256, shape.taps, False))
        assert [t.shape for t in step.outputs] == [(rows, shape.vocab), (rows, width)]


def measured(capture: Capture | None, dtype: torch.dtype = torch.float32) -> Result:
    result: Result = {}
    costs_module.costs(
        result,
        TINY,
        CPU,
        dtype,
        contexts=(16, 48),
        rows=(1, 2, 8),
        repeats=2,
        capture=capture,
        read_bytes=1 << 20,
    )
    return result


def test_costs_are_measured_eager_and_as_graphs_that_agree() -> None:
    result = measured(eager_capture)
    assert all(result["checks"].values()) and len(result["checks"]) == 4
    for context in (16, 48):
        at = result[f"context {context}"]
        assert [*at["step_s"]] == [*at["graphed_step_s"]] == ["1", "2", "8"]
        assert at["graphed_drafts_equal"] == [True] * 3 and at["graphed_step_apart"] < 1e-5
        assert at["draft_s"]["median"] > 0 and at["graphed_draft_s"]["count"] == 2
    assert result["target_bytes_read"] == 4 * random_pair(TINY, CPU, torch.float32, 8).target_parameters
    assert 0 < result["shares"]["overhead_share"] < 0.6
    assert result["shares"]["rounds"] > 0


def test_a_graph_that_does_not_read_its_inputs_is_noticed() -> None:
    result = measured(frozen_capture)
    assert not any(result["checks"].values())
    assert not all(result["context 16"]["graphed_drafts_equal"])


def test_without_graphs_nothing_is_said_of_them() -> None:
    result = measured(None, torch.bfloat16)
    assert result["checks"] == {} and "graphed_draft_s" not in result["context 16"]


def test_a_graphed_draft_follows_its_anchor() -> None:
    pair = random_pair(TINY, CPU, torch.float32, 64)
    features = torch.randn(12, pair.draft.config.feature_size, generator=torch.Generator().manual_seed(0))
    graphed = GraphedDraft(pair.draft, features, eager_capture)
    pair.draft.observe(features, 0)
    blocks = [pair.draft.draft(anchor, 12).tokens for anchor in (1, 2, 3)]
    assert [graphed.draft(anchor)[0] for anchor in (1, 2, 3)] == blocks and len({tuple(b) for b in blocks}) == 3


# The race of a real pair


@needs_golden
@pytest.mark.slow
def test_a_pair_races_in_both_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 1)  # more threads only slow such small models
    result: Result = {}
    prompts = [Prompt(f"ids-{n}", "ids", ids=(n, n + 1, n + 2)) for n in range(1, 4)]
    folder = GOLDEN / "qwen3-vanilla"
    pair_race(result, CPU, Models(folder / "target", folder / "draft", "tiny"), prompts)
    assert all(result["checks"].values()) and len(result["checks"]) == 2
    assert result["float32"]["identity"]["verdict"] == "identical" and result["float32_agreement_with_cpu"] == 1
    assert result["bfloat16"]["repeats"] == 3 and result["bfloat16"]["dspark"]["mean_accepted_length"] > 1
    with pytest.raises(Skipped):
        pair_race({}, CPU, None)


# The command


def test_without_a_cuda_device_there_is_nothing_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--out", str(tmp_path / "out.json")]) == 0
    assert "nothing to check" in capsys.readouterr().out and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("met", "code"), [(True, 0), (False, 1)])
def test_the_command_stores_records_and_its_exit_code_says_whether_all_passed(
    met: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(result: Result) -> None:
        command.environment(result, CPU)
        result["checks"] = {"it holds": met}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(parts.gc, "collect", lambda: 0)
    monkeypatch.setattr(command, "find_models", lambda target, draft: None)
    monkeypatch.setattr(command, "check_parts", lambda device, golden, models: [Part("only", 5, part)])
    assert command.main(["--out", str(tmp_path / "out.json")]) == code
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["parts"]["only"]["status"] == ("passed" if met else "failed")
    assert stored["parts"]["only"]["versions"]["torch"] == torch.__version__
    assert stored["command"].startswith("python -m local_runner.gpu_check")
    assert ("ok: it holds" if met else "NOT SO: it holds") in capsys.readouterr().out


def test_a_folder_of_recorded_runs_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "out.json"
    assert command.main(["--golden", str(tmp_path / "nowhere"), "--out", str(out)]) == 2
    assert "There is no folder" in capsys.readouterr().err and not out.exists()


def test_all_parts_fit_into_the_time_of_the_whole() -> None:
    listed = command.check_parts(CPU, None, None)
    assert [p.name for p in listed] == [
        "environment",
        "golden runs",
        "acceptance rules",
        "sampled streams",
        "costs of Qwen3-4B",
        "costs of Qwen3-8B",
        "race",
    ]
    assert sum(p.seconds for p in listed) <= command.SECONDS < 8 * 60


def test_models_are_given_together_or_looked_for_without_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="belong together"):
        command.find_models("somewhere", None)

    def absent(name: str) -> Any:
        raise InputError("it is not there")

    monkeypatch.setattr(command, "resolve_pair", absent)
    assert command.find_models(None, None) is None
