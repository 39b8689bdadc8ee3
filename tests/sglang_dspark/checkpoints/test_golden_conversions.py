"""Golden drafts, converted to each format and back, still reproduce every recorded round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import GOLDEN, converted
from safetensors.torch import load_file, save_file

from local_runner.engines.base import Request
from local_runner.engines.torch import TorchEngine, load_engine
from sglang_dspark.checkpoints.fit import ready
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed, Threshold

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden runs at {GOLDEN}; set DSPARK_GOLDEN"),
]
WAYS = [
    *[
        (name, to)
        for name in ("qwen3-vanilla", "qwen3-gated", "qwen3-rnn")
        for to in ("speculators", "specforge", "sglang")
    ],
    *[("qwen3-dflash", to) for to in ("speculators", "specforge", "gguf")],
    ("qwen3-vanilla", "gguf"),
    ("gemma4-vanilla", "deepspec"),
]


def rounds(engine: TorchEngine, run: dict[str, Any]) -> list[dict[str, Any]]:
    threshold = run["confidence_threshold"]
    request = Request(
        tuple(run["prompt"]), run["max_new_tokens"] + 1, SamplingParams(),
        schedule=Threshold(threshold) if threshold else Fixed(),
    )  # fmt: skip
    return [
        {"start": r.position, "anchor": r.anchor, "drafted_full": list(r.drafted), "scheduled": r.scheduled,
         "accepted": r.accepted, "next_token": r.next_token}
        for r in list(engine.generate(request))[1:]
    ]  # fmt: skip


def reproduces(target: Path, draft: Path, runs: list[dict[str, Any]]) -> bool:
    engine = load_engine(target, draft, dtype="float32", device="cpu", context_length=200)
    return all(
        rounds(engine, run) == [{k: v for k, v in r.items() if k != "confidence_logits"} for r in run["rounds"]]
        for run in runs
    )


@pytest.mark.parametrize(("name", "to"), WAYS)
def test_there_and_back(name: str, to: str, tmp_path: Path) -> None:
    golden = GOLDEN / name
    away = converted(golden / "draft", to, tmp_path / "away")
    back = converted(away, "deepspec", tmp_path / "back")
    assert reproduces(golden / "target", back, json.loads((golden / "golden.json").read_text()))
    config, tensors = ready(read_draft(away), 8)
    original = read_draft(golden / "draft")
    assert config == original.config() and set(tensors) == set(original.tensors)


def test_a_tap_off_by_one_would_be_noticed(tmp_path: Path) -> None:
    golden = GOLDEN / "qwen3-vanilla"
    back = converted(converted(golden / "draft", "gguf", tmp_path / "away"), "deepspec", tmp_path / "back")
    config = json.loads((back / "config.json").read_text())
    config["target_layer_ids"] = [t + 1 for t in config["target_layer_ids"]]
    (back / "config.json").write_text(json.dumps(config))
    assert not reproduces(golden / "target", back, json.loads((golden / "golden.json").read_text())[:2])


def test_swapped_norms_would_be_noticed(tmp_path: Path) -> None:
    golden = GOLDEN / "qwen3-vanilla"
    back = converted(golden / "draft", "deepspec", tmp_path / "back")
    tensors = load_file(back / "model.safetensors")
    first, second = tensors["norm.weight"].clone(), tensors["hidden_norm.weight"].clone()
    assert not torch.equal(first, second)
    save_file({**tensors, "norm.weight": second, "hidden_norm.weight": first}, back / "model.safetensors")
    assert not reproduces(golden / "target", back, json.loads((golden / "golden.json").read_text())[:2])
