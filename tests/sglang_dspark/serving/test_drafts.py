"""What becomes of draft checkpoints before SGLang sees them: refused in a sentence, or shown in its own spelling."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import GOLDEN, QWEN3, converted, rewrite, save, weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.targets import read_target
from sglang_dspark.errors import InputError
from sglang_dspark.serving import drafts

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def refused(draft: Path, target: Path, block: int | None = None) -> str:
    with pytest.raises(InputError) as caught:
        drafts.prepare(str(draft), str(target), block, None, None)
    text = str(caught.value)
    assert "\n" not in text
    return text


def shown(draft: Path, target: Path, block: int | None = None) -> dict[str, Any]:
    admitted = drafts.prepare(str(draft), str(target), block, None, None)
    data: dict[str, Any] = json.loads((admitted.folder / "config.json").read_text())
    return data


def test_a_sound_draft_is_linked_not_copied(make: Make, target: Path) -> None:
    draft = make()
    admitted = drafts.prepare(str(draft), str(target), None, None, None)
    weights = admitted.folder / "model.safetensors"
    assert weights.is_symlink() and weights.resolve() == (draft / "model.safetensors").resolve()
    assert admitted.own_class is None
    assert drafts.prepare(str(draft), str(target), None, None, None) == admitted


def test_a_changed_draft_gets_another_view(make: Make, target: Path) -> None:
    draft = make()
    first = drafts.prepare(str(draft), str(target), None, None, None)
    rewrite(draft, mask_token_id=62)
    assert drafts.prepare(str(draft), str(target), None, None, None).folder != first.folder


@pytest.mark.parametrize("format", ["deepspec", "sglang", "specforge", "speculators"])
def test_every_format_is_shown_at_the_root(format: str, make: Make, target: Path, tmp_path: Path) -> None:
    source = make(markov_head_type="gated")
    draft = source if format == "deepspec" else converted(source, format, tmp_path / format)
    data = shown(draft, target)
    wanted = {
        "block_size": 5,
        "mask_token_id": 63,
        "target_layer_ids": [1, 3],
        "num_target_layers": 6,
        "markov_rank": 32,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "model_type": "qwen3",
        "hidden_size": 32,
        "architectures": ["Qwen3DSparkModel"],
    }
    assert {name: data[name] for name in wanted} == wanted
    assert "dflash_config" not in data


@pytest.mark.parametrize("format, prefix", [("specforge", "logit_head."), ("sglang", "model.")])
def test_heads_under_other_names_get_the_class_that_renames(
    format: str, prefix: str, make: Make, target: Path, tmp_path: Path
) -> None:
    draft = converted(make(), format, tmp_path / format)
    file = draft / "model.safetensors"
    heads = ("markov_head.", "confidence_head.")
    save_file({f"{prefix}{n}" if n.startswith(heads) else n: t for n, t in load_file(file).items()}, file)
    admitted = drafts.prepare(str(draft), str(target), None, None, None)
    assert admitted.own_class == drafts.OWN_CLASS
    assert json.loads((admitted.folder / "config.json").read_text())[drafts.SOURCE_FORMAT] == format


def test_fewer_tokens_than_trained_are_said(make: Make, target: Path) -> None:
    assert shown(make(), target, 3)["block_size"] == 3


def test_a_block_with_one_row_more_is_counted_in_drafts(make: Make, target: Path, tmp_path: Path) -> None:
    draft = make(sample_from_anchor=False)
    data = shown(draft, target)
    assert (data["block_size"], data["sample_from_anchor"]) == (5, False)


def test_sliding_layers_see_both_ways(make: Make, target: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    data = shown(make(layer_types=kinds, use_sliding_window=True, sliding_window=6), target)
    assert data["is_causal"] is False
    assert "is_causal" not in shown(make(name="full"), target)


def test_gemma4_is_described_layer_by_layer(tmp_path: Path) -> None:
    pair = GOLDEN / "gemma4-vanilla"
    draft = read_draft(pair / "draft")
    config = drafts.admit(draft, read_target(pair / "target"), None)
    assert config is not None
    data = drafts.native(draft, config)
    assert data["architectures"] == ["Gemma4DSparkModel"]
    assert (data["head_dim"], data["num_key_value_heads"]) == (32, 2)
    assert data["final_logit_softcapping"] == 30.0
    layer = data["dspark_layers"][1]
    assert layer["rope"] == {"type": "proportional", "theta": 1e6, "parameters": {"partial_rotary_factor": 0.25}}
    json.dumps(data)


@pytest.mark.parametrize("taps", [[-1, 3, 5], [1, 3, 7]])
def test_gemma4_taps_what_sglang_can(taps: list[int], tmp_path: Path) -> None:
    pair = GOLDEN / "gemma4-vanilla"
    raw = json.loads((pair / "draft" / "config.json").read_text()) | {"target_layer_ids": taps}
    draft = save(tmp_path / "draft", raw, load_file(pair / "draft" / "model.safetensors"))
    assert "neither the embedding nor the last layer" in refused(draft, pair / "target")


def cached(repo: str, commit: str, source: Path, cache: Path) -> None:
    """What huggingface_hub leaves of a repository that was fetched."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots").mkdir()
    shutil.copytree(source, folder / "snapshots" / commit)


def test_what_was_fetched_before_is_served_offline(
    make: Make, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "HF_HUB_OFFLINE", True)
    cache, commit = tmp_path / "hub", "0123456789" * 4
    cached("somebody/draft", commit, make(), cache)
    cached("somebody/target", commit, target, cache)
    admitted = drafts.prepare("somebody/draft", "somebody/target", None, None, str(cache))
    assert (admitted.folder / "model.safetensors").resolve().parent.name == commit


def lengthen(file: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    "changes, block, words",
    [
        ({"hidden_size": 64}, None, "for another target"),
        ({"num_target_layers": 8}, None, "for another target"),
        ({}, 6, "trained for 5"),
        ({"target_layer_ids": [1, 5]}, None, "neither the embedding nor the last layer"),
        ({"target_layer_ids": [-1, 3]}, None, "neither the embedding nor the last layer"),
        ({"target_layer_ids": [3, 6]}, None, "counted as inputs"),
        (
            {"markov_rank": 0, "markov_head_type": "none", "confidence_head_with_markov": False},
            None,
            "--speculative-algorithm DFLASH",
        ),
        ({"mask_token_id": 64}, None, "mask token id"),
        ({"architectures": ["Qwen3ForCausalLM"]}, None, "no draft of a known format"),
    ],
)
def test_refused_by_its_configuration(
    changes: dict[str, Any], block: int | None, words: str, make: Make, target: Path
) -> None:
    assert words in refused(make(**changes), target, block)


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda t: t.pop("fc.weight"), "lacks 'fc.weight'"),
        (lambda t: t.update({"layers.7.mlp.up_proj.weight": torch.ones(2)}), "no place for"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), "has shape [3]"),
        (lambda t: t.update({"markov_head.w2": t.pop("markov_head.markov_w2.weight")}), "is it misnamed?"),
    ],
)
def test_refused_by_its_tensors(edit: Callable[[dict[str, Tensor]], Any], words: str, make: Make, target: Path) -> None:
    draft = make()
    lengthen(draft / "model.safetensors", edit)
    assert words in refused(draft, target)


def test_a_reduced_vocabulary_is_refused_with_the_conversion_that_helps(
    make: Make, target: Path, tmp_path: Path
) -> None:
    source = converted(make(), "speculators", tmp_path / "speculators")
    data = json.loads((source / "config.json").read_text()) | {"draft_vocab_size": 40}
    ids = torch.arange(0, 40)
    tensors = weights(QWEN3, reduced=40) | {"d2t": ids - torch.arange(40), "t2d": torch.arange(64) < 40}
    draft = save(tmp_path / "reduced", data, tensors)
    text = refused(draft, target)
    assert "only 40 tokens" in text and f"dspark convert {draft} --to sglang" in text


def test_a_gguf_is_refused_with_the_conversion_that_helps(make: Make, target: Path, tmp_path: Path) -> None:
    draft = converted(make(), "gguf", tmp_path / "gguf")
    assert "GGUF" in refused(draft, target) and "dspark convert" in refused(draft, target)


def test_an_lm_head_of_its_own_is_refused(make: Make, target: Path) -> None:
    head = torch.randn(64, 32).bfloat16()
    embedding = torch.randn(64, 32).bfloat16()
    save_file({"lm_head.weight": head, "model.embed_tokens.weight": embedding}, target / "model.safetensors")
    same = make(edit=lambda t: t.update({"lm_head.weight": head.clone()}), name="same")
    drafts.prepare(str(same), str(target), None, None, None)
    tuned = make(edit=lambda t: t.update({"lm_head.weight": head + 1}), name="tuned")
    assert "lm_head differs from the target's" in refused(tuned, target)
