"""Models and requests that cannot be used: one sentence and exit code 2 from the command line, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from local_runner.cli import app

PROMPT = "1,2,3"


@pytest.fixture
def pair(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `target` and a `draft` that decode, to be spoilt by a test."""
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "store"))
    for part in ("target", "draft"):
        shutil.copytree(golden / "qwen3-vanilla" / part, tmp_path / part)
    return tmp_path


Refused = Callable[..., str]


@pytest.fixture
def refused(pair: Path, capfd: pytest.CaptureFixture[str]) -> Refused:
    """refused(says, **options): `generate` refuses with a sentence that holds `says`; returns the sentence."""

    def run(*says: str, prompt_ids: str = PROMPT, **options: Any) -> str:
        given = {"target": pair / "target", "draft": pair / "draft", "dtype": "float32", "threads": 1, "device": "cpu"}
        given |= {"context_length": 128, "max_new_tokens": 4, "events": pair / "events.jsonl"} | options
        arguments = [f"--{k.replace('_', '-')}={v}" for k, v in given.items() if v is not None]
        result = CliRunner().invoke(app, ["generate", f"--prompt-ids={prompt_ids}", *arguments])
        assert result.exit_code == 2, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        progress, _, sentence = result.stderr.rpartition("Error: ")
        assert all(line.startswith(("Reading the ", "Unpacking ")) for line in progress.splitlines()), result.stderr
        assert sentence.count("\n") == 1 and sentence.endswith(("\n", ".\n")) and "Traceback" not in sentence
        for part in says:
            assert part in sentence, sentence
        assert result.stdout == ""
        assert capfd.readouterr() == ("", ""), "something wrote past the command line"
        assert not (pair / "events.jsonl").exists()
        return sentence

    return run


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t.clone() for name, t in tensors.items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_pair_decodes_before_it_is_spoilt(pair: Path) -> None:
    models = [f"--target={pair / 'target'}", f"--draft={pair / 'draft'}", "--dtype=float32", "--threads=1"]
    request = ["--prompt-ids=1,2,3", "--max-new-tokens=4", f"--events={pair / 'events.jsonl'}"]
    result = CliRunner().invoke(app, ["generate", *models, *request])
    assert result.exit_code == 0, result.output
    assert len(result.stdout.split(",")) == 4 and (pair / "events.jsonl").is_file()


@pytest.mark.parametrize("part", ["target", "draft"])
def test_there_is_no_folder(part: str, pair: Path, refused: Refused) -> None:
    refused(str(pair / "nowhere"), **{part: pair / "nowhere"})


@pytest.mark.parametrize("part", ["target", "draft"])
def test_there_is_no_config(part: str, pair: Path, refused: Refused) -> None:
    (pair / part / "config.json").unlink()
    refused(str(pair / part), "config.json")


@pytest.mark.parametrize("part", ["target", "draft"])
@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model_type": "nothing-like-it"}'])
def test_the_config_says_nothing(part: str, text: str, pair: Path, refused: Refused) -> None:
    (pair / part / "config.json").write_text(text)
    refused(str(pair / part))


@pytest.mark.parametrize("part", ["target", "draft"])
@pytest.mark.parametrize("kept", [0, 5, 400, -1])
def test_the_weights_are_truncated(part: str, kept: int, pair: Path, refused: Refused) -> None:
    file = pair / part / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(str(file))


@pytest.mark.parametrize("part", ["target", "draft"])
def test_there_are_no_weights(part: str, pair: Path, refused: Refused) -> None:
    (pair / part / "model.safetensors").unlink()
    refused(str(pair / part), "model.safetensors")


@pytest.mark.parametrize("part", ["target", "draft"])
def test_there_are_only_pickled_weights(part: str, pair: Path, refused: Refused) -> None:
    (pair / part / "model.safetensors").unlink()
    torch.save({}, pair / part / "pytorch_model.bin")
    refused(str(pair / part), "pickled weights", "pytorch_model.bin")


def test_a_draft_tensor_is_missing(pair: Path, refused: Refused) -> None:
    edit_tensors(pair / "draft", lambda t: t.pop("layers.1.mlp.up_proj.weight"))
    refused("lacks 'layers.1.mlp.up_proj.weight'")


def test_a_draft_tensor_is_one_too_many(pair: Path, refused: Refused) -> None:
    edit_tensors(pair / "draft", lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.ones(2, 2)}))
    refused("holds 'layers.2.mlp.up_proj.weight'")


def test_a_draft_tensor_is_misnamed(pair: Path, refused: Refused) -> None:
    edit_tensors(pair / "draft", lambda t: t.update({"markov_head.w1.weight": t.pop("markov_head.markov_w1.weight")}))
    refused("lacks 'markov_head.markov_w1.weight'", "'markov_head.w1.weight' is there: is it misnamed?")


def test_a_draft_tensor_has_another_shape(pair: Path, refused: Refused) -> None:
    edit_tensors(pair / "draft", lambda t: t.update({"fc.weight": torch.zeros(64, 128)}))
    refused("'fc.weight'", "has shape [64, 128]", "[64, 192]")


def test_a_target_tensor_is_missing(pair: Path, refused: Refused) -> None:
    edit_tensors(pair / "target", lambda t: t.pop("model.layers.3.mlp.up_proj.weight"))
    refused("lacks the tensor model.layers.3.mlp.up_proj.weight")


def test_a_target_tensor_has_another_shape(pair: Path, refused: Refused) -> None:
    edit_tensors(pair / "target", lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(7, 7)}))
    refused("has another shape for the tensor model.layers.3.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 32}, "its hidden size is 32, that of target is 64"),
        ({"vocab_size": 191}, "its vocabulary is 191, that of target is 192"),
        ({"num_target_layers": 7}, "its number of target layers is 7, that of target is 8"),
        ({"target_layer_ids": [1, 3, 8]}, "the tapped layers [1, 3, 8] go one past the last of 8 layers"),
        ({"target_layer_ids": [3, 1]}, "the tapped layers [3, 1] do not rise"),
        ({"mask_token_id": 192}, "mask token id 192 is outside the vocabulary"),
        ({"mask_token_id": ...}, "lacks 'mask_token_id'"),
        ({"block_size": 0}, "'block_size'"),
        ({"markov_rank": 0}, "a confidence head with Markov features needs a confidence head and a Markov head"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ],
)
def test_the_draft_is_for_another_target(changes: dict[str, Any], says: str, pair: Path, refused: Refused) -> None:
    edit_config(pair / "draft", **changes)
    refused(says)


def test_the_block_is_longer_than_trained(refused: Refused) -> None:
    refused("A block of 8 was asked of", "trained for 7", block=8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_ids": ""}, "--prompt-ids has '' where a token id belongs"),
        ({"prompt_ids": "1,x"}, "--prompt-ids has 'x'"),
        ({"prompt_ids": "1,192"}, "Prompt token 192 is outside the target's vocabulary of 192 tokens"),
        ({"prompt_ids": ",".join(["1"] * 128)}, "The prompt has 128 tokens, which leaves no room in a context of 128"),
        ({"context_length": 513}, "A context of 513 tokens does not fit the target"),
        ({"target": None, "draft": None, "pair": "smollm3"}, "smollm3"),
        ({"target": "smollm2-134m"}, "smollm2-134m"),
        ({"temperature": -0.1}, "temperature is -0.1, but must be a number of at least 0"),
        ({"temperature": "nan"}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0.0"),
        ({"confidence_threshold": 1.5}, "threshold:1.5"),
        ({"schedule": "greedy"}, "'greedy' is no schedule"),
        ({"stop": "x"}, "Stop strings need the target's tokenizer"),
    ],
)
def test_the_request_cannot_be(options: dict[str, Any], says: str, refused: Refused) -> None:
    refused(says, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_there_is_no_such_device(refused: Refused) -> None:
    refused("PyTorch finds no cuda device on this machine", device="cuda")


@pytest.mark.parametrize(
    ("option", "value"), [("device", "tpu"), ("dtype", "int8"), ("block", 0), ("threads", 0), ("max_new_tokens", 0)]
)
def test_an_option_has_no_such_value(option: str, value: object, pair: Path) -> None:
    """The option parser's own message, in its box."""
    name = f"--{option.replace('_', '-')}"
    result = CliRunner().invoke(app, ["generate", f"--target={pair / 'target'}", "--prompt-ids=1", f"{name}={value}"])
    assert result.exit_code == 2 and result.stdout == ""
    assert f"Invalid value for '{name}'" in result.stderr


def test_there_is_no_prompt_in_text_without_a_tokenizer(pair: Path) -> None:
    target = f"--target={pair / 'target'}"
    result = CliRunner().invoke(app, ["generate", target, "--prompt=hello", "--threads=1", "--dtype=float32"])
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "Error: The target has no tokenizer, so it cannot read text; give the prompt with --prompt-ids.\n"
    )
    result = CliRunner().invoke(app, ["generate", target, "--prompt= "])
    assert (result.exit_code, result.stderr) == (2, "Error: The prompt is empty; say something to answer.\n")


def test_a_gguf_file_that_is_none(pair: Path, refused: Refused) -> None:
    (pair / "target.gguf").write_bytes((pair / "target" / "model.safetensors").read_bytes())
    refused("target.gguf does not begin as a GGUF file does", target=pair / "target.gguf", draft=None)
