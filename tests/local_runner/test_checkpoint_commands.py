"""`dspark doctor` and `dspark convert`: what people see, what machines read, and exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from local_runner import doctor_command
from local_runner.cli import Program
from local_runner.convert_command import convert
from local_runner.doctor_command import doctor, place_of
from sglang_dspark.checkpoints.drafts import Draft
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.hub import HubRepo
from sglang_dspark.checkpoints.places import Folder
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.spelling import expected_tensors, parse_config
from sglang_dspark.errors import InputError

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "block_size": 5, "mask_token_id": 63,
    "target_layer_ids": [1, 3], "num_target_layers": 6, "markov_rank": 32, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
TARGET = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 6}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A draft and the configuration of its target, in an empty store."""
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    draft, target = tmp_path / "draft", tmp_path / "target"
    for folder, data in ((draft, CONFIG), (target, TARGET)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(data))
    shapes = expected_tensors(parse_config(Fields(CONFIG, "a test")))
    save_file(
        {n: torch.arange(1.0, 1.0 + math.prod(s)).view(s) for n, s in shapes.items() if "embed" not in n},
        draft / "model.safetensors",
    )
    return draft, target


def dspark(*arguments: object) -> Result:
    app = typer.Typer(cls=Program)
    app.command()(doctor)
    app.command()(convert)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_doctor_shows_tables(pair: tuple[Path, Path]) -> None:
    result = dspark("doctor", pair[0], "--target", pair[1])
    assert result.exit_code == 0 and result.stderr == ""
    engines = ("SGLang 0.5.23", "SGLang with this package", "llama.cpp")
    for words in ("taps", "outputs of the target's layers 1, 3", *engines):
        assert words in result.stdout, words


def test_doctor_writes_json_alone_on_standard_output(pair: tuple[Path, Path]) -> None:
    result = dspark("doctor", pair[0], "--target", pair[1], "--json")
    data = json.loads(result.stdout)
    assert data["sound"] and data["format"] == "deepspec" and result.exit_code == 0
    assert {e["engine"]: e["verdict"] for e in data["engines"]}["torch"] == "runs"
    assert {c["check"]: c["state"] for c in data["checks"]}["anchor"] == "ok"


def test_a_failed_check_is_exit_code_1(pair: tuple[Path, Path]) -> None:
    (pair[1] / "config.json").write_text(json.dumps({**TARGET, "num_hidden_layers": 8}))
    result = dspark("doctor", pair[0], "--target", pair[1], "--json")
    assert result.exit_code == 1 and not json.loads(result.stdout)["sound"]
    assert result.stderr == f"Error: {pair[0]} failed: target.\n"
    assert dspark("doctor", pair[0], "--block", "6").exit_code == 1
    assert dspark("doctor", pair[0], "--block", "5").exit_code == 0


@pytest.mark.parametrize("arguments", [(), ("absent",), ("./absent",), ("--explain", "nothing")])
def test_nothing_to_read_is_exit_code_2(arguments: tuple[str, ...], pair: tuple[Path, Path]) -> None:
    result = dspark("doctor", *arguments)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1


def test_doctor_explains(pair: tuple[Path, Path]) -> None:
    result = dspark("doctor", "--explain", "taps")
    assert result.exit_code == 0 and "counted two ways" in result.stdout


def test_deep_reads_weights(pair: tuple[Path, Path]) -> None:
    result = dspark("doctor", pair[0], "--deep", "--json")
    states = {c["check"]: c["state"] for c in json.loads(result.stdout)["checks"]}
    assert states["finite"] == "ok" and "acceptance" not in states
    # The target is a configuration without weights, which is a note and not a failure of the draft.
    result = dspark("doctor", pair[0], "--target", pair[1], "--deep", "--json")
    states = {c["check"]: (c["state"], c["text"]) for c in json.loads(result.stdout)["checks"]}
    assert states["acceptance"][0] == "note" and "was not measured" in states["acceptance"][1]


def test_what_is_not_here_is_a_repository(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(pair[0].parent))
    assert place_of("owner/name", is_draft=True, pull=False) == HubRepo("owner/name")
    assert place_of("qwen3-4b", is_draft=True, pull=False) == HubRepo("deepseek-ai/dspark_qwen3_4b_block7")
    assert place_of("qwen3-4b", is_draft=False, pull=False) == HubRepo("Qwen/Qwen3-4B")
    assert place_of("deepseek-v4-flash", is_draft=True, pull=False) == HubRepo("deepseek-ai/DeepSeek-V4-Flash-DSpark")
    assert place_of(str(pair[0]), is_draft=True, pull=False) == Folder(pair[0])


@pytest.mark.parametrize("spec", ["x" * 300, "/x" * 3000, "~nobody-of-that-name/x"])
def test_paths_that_cannot_be_are_said_in_a_sentence(spec: str, pair: tuple[Path, Path]) -> None:
    for arguments in (("doctor", spec), ("doctor", pair[0], "--target", spec)):
        result = dspark(*arguments)
        assert result.exit_code == 2 and result.stdout == "", result.exception
        assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1 and len(result.stderr) < 500
    result = dspark("convert", pair[0], "--to", "sglang", "--out", "x" * 300)
    assert result.exit_code == 2 and "File name too long" in result.stderr


def test_a_pairs_name_means_both(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def place(spec: str, *, is_draft: bool, pull: bool) -> Folder:
        asked.append((spec, is_draft))
        return Folder(pair[0] if is_draft else pair[1])

    monkeypatch.setattr(doctor_command, "place_of", place)
    assert dspark("doctor", "qwen3-4b").exit_code == 0
    assert asked == [("qwen3-4b", True), ("qwen3-4b", False)]


def test_convert_says_what_it_did(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = dspark("convert", pair[0], "--to", "speculators", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{out}: deepspec to speculators") and "SHA-256 " in result.stdout
    assert read_draft(out).config() == read_draft(pair[0]).config()
    again = dspark("convert", pair[0], "--to", "speculators", "--out", out)
    assert again.exit_code == 2 and "is there already" in again.stderr


def test_convert_refuses_losses_until_they_are_allowed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    arguments = ("convert", pair[0], "--to", "gguf", "--out", tmp_path / "g", "--markov-type", "q8_0")
    result = dspark(*arguments)
    assert result.exit_code == 2 and "--allow-loss tokenizer" in result.stderr and not (tmp_path / "g").exists()
    result = dspark(*arguments, "--allow-loss", "tokenizer")
    assert result.exit_code == 0 and "without its tokenizer" in result.stdout
    assert (tmp_path / "g" / "g.gguf").is_file()
    wrong = dspark(*arguments[:5], tmp_path / "h", "--allow-loss", "tokenizer", "--allow-loss", "nothing")
    assert wrong.exit_code == 2 and "nothing of that name" in wrong.stderr


def test_gguf_types_are_for_gguf(pair: tuple[Path, Path], tmp_path: Path) -> None:
    result = dspark("convert", pair[0], "--to", "sglang", "--out", tmp_path / "s", "--markov-type", "f16")
    assert result.exit_code == 2 and "are for --to gguf" in result.stderr


def test_the_target_fills_in_what_the_file_leaves_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "num_target_layers"}
    (pair[0] / "config.json").write_text(json.dumps(config))
    result = dspark("convert", pair[0], "--to", "deepspec", "--out", tmp_path / "d")
    assert result.exit_code == 2 and "lacks 'num_target_layers'" in result.stderr
    result = dspark("convert", pair[0], "--to", "deepspec", "--out", tmp_path / "d", "--target", pair[1])
    assert result.exit_code == 0 and read_draft(tmp_path / "d").config().num_target_layers == 6


def test_only_a_bundled_module_is_streamed_from_a_hub(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else is fetched and verified first."""
    from local_runner import convert_command

    asked: list[bool] = []

    class Remote(HubRepo):
        pass

    def place(spec: str, *, is_draft: bool, pull: bool) -> Any:
        asked.append(pull)
        return Folder(pair[0]) if pull else Remote("o/n")

    def read(where: Any) -> Draft:
        return read_draft(Folder(pair[0]))

    monkeypatch.setattr(doctor_command, "place_of", place)
    monkeypatch.setattr("sglang_dspark.checkpoints.registry.read_draft", read)
    convert_command._draft("o/n")
    assert asked == [False, True]


@pytest.mark.slow
def test_the_default_pair_is_sound() -> None:
    try:
        place_of("smollm2-135m", is_draft=False, pull=False)
    except InputError as error:
        pytest.skip(f"the default pair is not here: {error}")
    result = dspark("doctor", "smollm2-135m", "--deep", "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["sound"]
    acceptance = next(c for c in data["checks"] if c["check"] == "acceptance")
    # How many blocks a minute has, and so how sure the judgement is, depends on the machine.
    assert acceptance["state"] in ("ok", "warning") and "tokens a round over" in acceptance["text"]


def test_reports_are_for_machines_too(pair: tuple[Path, Path]) -> None:
    data = json.loads(dspark("doctor", pair[0], "--json").stdout)
    assert set(data) == {"draft", "target", "format", "sound", "checks", "engines"}
    assert set(data["engines"][0]) == {"engine", "title", "verdict", "basis", "reasons"}
