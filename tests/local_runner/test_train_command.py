"""The commands that make a head: recipes, sizes, refusals, and the whole way from a model to a head that drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from local_runner.cli import app
from local_runner.train_command import _bytes
from local_runner.training import curve, read_recipe
from sglang_dspark.checkpoints.doctor import examine, subject
from sglang_dspark.checkpoints.places import Folder
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.targets import read_target
from sglang_dspark.errors import InputError
from sglang_dspark.training.conversations import Conversation, write_shard

RECIPES = Path(__file__).parents[2] / "configs" / "training"
SMALL = """
[synthesise]
slots = 8
prompt_tokens = 8
answer_tokens = 40
answer_temperatures = [0.0]
distinct = 0.0
[head]
layers = 1
rank = 16
[train]
sequences = 4
anchors = 8
evaluate_every = 50
held_out_share = 5
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_stored_recipes_are_read() -> None:
    files = sorted(RECIPES.glob("*.toml"))
    assert files
    for file in files:
        recipe, shape, _ = read_recipe(file)
        assert recipe.rows(0.0, shape.block) >= 1 and recipe.rows(1.0, shape.block) == shape.block


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nsteps_ = 3", r"train\.steps_"),
        ("[other]\na = 1", "'other'"),
        ("train = 3", "'train'"),
        ("[train", "not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=says):
        read_recipe(file)


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("700", 700), ("2mb", 2 * 10**6)]
)
def test_sizes(text: str, size: int) -> None:
    assert _bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-4GB", "4TBs", "GB"])
def test_no_size(text: str) -> None:
    with pytest.raises(InputError, match="no size of memory"):
        _bytes(text)


def test_the_curve_is_a_picture() -> None:
    metrics = [
        {"step": s, "ce": 3.0 / s, "tv": 0.5, "accepted_length": 1.0 + s / 10, "conditional": (0.5, 0.4)}
        for s in (1, 2)
    ]
    assert curve(metrics).startswith("<svg") and "Held out" in curve(metrics)


def test_training_without_conversations_is_one_sentence(target: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    run = CliRunner().invoke(
        app, ["train", "--target", str(target), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "head")]
    )
    assert run.exit_code == 2 and "There are no conversations in" in run.output
    assert "Traceback" not in run.output and not (tmp_path / "head" / "model.safetensors").exists()


@pytest.mark.slow
def test_from_a_model_to_a_head_that_drafts(target: Path, tmp_path: Path) -> None:
    recipe, head = tmp_path / "recipe.toml", tmp_path / "head"
    recipe.write_text(SMALL)
    common = ["train", "--target", str(target), "--recipe", str(recipe), "--threads", "1", "--feature-budget", "50MB"]

    def accepted(out: Path) -> float:
        rounds = []
        for prompt in ("3,14,15", "9,2", "6,5,35,8"):
            events = tmp_path / "events.jsonl"
            run = CliRunner().invoke(
                app,
                ["generate", "--target", str(target), "--draft", str(out), "--prompt-ids", prompt, "--max-new-tokens",
                 "90", "--dtype", "float32", "--events", str(events)],
            )  # fmt: skip
            assert run.exit_code == 0, run.output
            rounds += [json.loads(line) for line in events.read_text().splitlines()][1:]
        return sum(r["accepted"] + 1 for r in rounds) / len(rounds)

    run = CliRunner().invoke(app, [*common, "--out", str(head), "--minutes", "1"])
    assert run.exit_code == 0, run.output
    report = examine(subject(read_draft(head), read_target(Folder(target)), None), [], str(head))
    assert report.sound
    assert json.loads((head / "training.json").read_text())["held_out"]["accepted_length"] > 1.0
    assert (head / "curve.svg").is_file()

    untrained = CliRunner().invoke(
        app, [*common, "--out", str(tmp_path / "untrained"), "--data", str(head / "data"), "--steps", "1"]
    )
    assert untrained.exit_code == 0, untrained.output
    assert accepted(head) > accepted(tmp_path / "untrained") + 0.05


@pytest.mark.slow
def test_the_part_of_the_gpu_check_leaves_a_head(target: Path, tmp_path: Path) -> None:
    from local_runner.gpu_check.training import trained_head

    recipe, result = tmp_path / "recipe.toml", {}
    recipe.write_text(SMALL)
    trained_head(result, device="cpu", target=target, recipe=recipe, seconds=70, out=tmp_path / "head")
    assert result["checks"] == {"the head drafts what the target wants": True}
    assert read_draft(tmp_path / "head").config(3).layers == 1 and result["text"]["answer_tokens"] > 0


WATCHED = """
import re, sys, threading
from pathlib import Path
import torch
from local_runner.training import Where, train
from sglang_dspark.training.head import Shape
from sglang_dspark.training.train import Recipe
target, data, out = map(Path, sys.argv[1:])
said = []
train(
    Where(target, "cpu", 1), Shape(layers=2, rank=32), Recipe(steps=8, sequences=2, anchors=96, evaluate_every=8),
    data, out, seconds=None, feature_budget=20_000_000, precision="float32", cancelled=threading.Event(),
    say=said.append,
)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
print(re.search(r"; ([0-9.]+) GB in all", said[0])[1], peak / 1e9)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_training_keeps_to_the_memory_that_it_states(tmp_path: Path) -> None:
    """Within 5 % or 64 MB of the peak of a process that trains, on a target whose parts all weigh something."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    (tmp_path / "data").mkdir()
    rows = [Conversation(n, "a", 0.0, 40, tuple(torch.randint(8192, (400,)).tolist())) for n in range(64)]
    write_shard(tmp_path / "data" / "0.jsonl", rows)
    folders = [str(tmp_path / name) for name in ("target", "data", "head")]
    done = subprocess.run([sys.executable, "-c", WATCHED, *folders], capture_output=True, text=True, check=True)
    stated, peak = map(float, done.stdout.split())
    assert abs(stated - peak) <= max(0.05 * peak, 0.064), (stated, peak)
