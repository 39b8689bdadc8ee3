"""Every format's spelling becomes the same description, and each is recognised as itself and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import GOLDEN, QWEN3, Make, converted, rewrite, save, weights
from safetensors.torch import load_file
from transformers import Qwen3Config

from sglang_dspark.checkpoints.registry import FORMATS, WRITABLE, read_draft
from sglang_dspark.checkpoints.speculators import QWEN3_DEFAULTS
from sglang_dspark.errors import InputError

V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
MINIMAX: dict[str, Any] = {
    "architectures": ["DSparkMiniMaxDraftModel"],
    "text_config": {"hidden_size": 32, "vocab_size": 64},
    "dspark_block_size": 7,
    "dspark_markov_rank": 16,
    "dspark_noise_token_id": 9,
    "dflash_config": {"target_layer_ids": [1, 2], "num_target_layers": 6, "num_hidden_layers": 2},
}
SPECFORGE_DROPS = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
                   "confidence_head_with_markov")  # fmt: skip


@pytest.mark.parametrize("to", [n for n in WRITABLE if n != "deepspec"])
def test_each_format_is_recognised_and_means_the_same(to: str, make: Make, tmp_path: Path) -> None:
    source = make()
    found = read_draft(converted(source, to, tmp_path / to))
    assert found.format.name == to
    assert found.config() == read_draft(source).config()
    assert set(found.tensors) == set(read_draft(source).tensors)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["Qwen3Eagle3Model"], "markov_rank": 1}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}}, "dflash"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash"),
        ({"speculators_model_type": "dflash"}, "dflash"),
        (MINIMAX, "minimax"),
        ({**QWEN3, "architectures": ["Lfm2DSparkDraftModel"]}, "lfm2"),
        ({**QWEN3, "architectures": ["LingDSparkModel"]}, "deepspec"),
        ({**QWEN3, "architectures": ["Qwen3DSparkModel"], "sample_from_anchor": True}, "sglang"),
        ({**QWEN3, "architectures": ["DSparkDraftModel"]}, "sglang"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"markov_rank": 8}}, "specforge"),
    ],
)
def test_recognised_by_configuration(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    draft = read_draft(save(tmp_path / "draft", config, {"fc.weight": torch.ones(2)}))
    assert draft.format.name == name


def test_every_format_documents_its_fields() -> None:
    import importlib

    for known in FORMATS:
        module = importlib.import_module(known.read.__module__)
        assert "| field |" in module.__doc__ or "| what |" in module.__doc__, known.name


def test_specforge_defaults(make: Make, tmp_path: Path) -> None:
    """Absent, confidence is off, its Markov features too: unlike everywhere else."""
    data = {k: v for k, v in QWEN3.items() if k not in SPECFORGE_DROPS}
    inner = {"mask_token_id": 63, "target_layer_ids": [1, 3], "markov_rank": 32}
    folder = save(tmp_path / "f", {**data, "architectures": ["DSparkDraftModel"], "dflash_config": inner}, {})
    config = read_draft(folder).config()
    assert (config.markov_head_type, config.confidence, config.confidence_with_markov) == ("vanilla", False, False)
    rewrite(folder, dflash_config={**inner, "confidence_head_alpha": 1.0})
    config = read_draft(folder).config()
    assert config.confidence and not config.confidence_with_markov


def test_architectures_that_are_no_names_are_passed_over(make: Make) -> None:
    assert read_draft(rewrite(make(), architectures=[{}, "Qwen3DSparkModel", 3])).config().layers == 2


def test_early_specforge_names(make: Make, tmp_path: Path) -> None:
    folder = converted(make(), "specforge", tmp_path / "s")
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"logit_head.{n}" if n.startswith(("markov", "confidence")) else n: t for n, t in tensors.items()}
    import json

    again = save(tmp_path / "early", json.loads((folder / "config.json").read_text()), renamed)
    assert set(read_draft(again).tensors) == set(tensors)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    tensors = {"markov_head.x": torch.ones(2), "logit_head.markov_head.x": torch.ones(2)}
    folder = save(tmp_path / "d", {"architectures": ["DSparkDraftModel"]}, tensors)
    with pytest.raises(InputError, match=r"holds 'markov_head\.x' twice"):
        len(read_draft(folder).tensors)


def test_speculators_says_only_what_differs_from_qwen3() -> None:
    theirs = Qwen3Config().to_dict()
    assert {k: theirs[k] for k in QWEN3_DEFAULTS} == QWEN3_DEFAULTS


def test_speculators_counts_inputs(make: Make, tmp_path: Path) -> None:
    import json

    folder = converted(make(target_layer_ids=[-1, 3]), "speculators", tmp_path / "s")
    assert json.loads((folder / "config.json").read_text())["aux_hidden_state_layer_ids"] == [0, 4]
    assert read_draft(folder).config().target_layer_ids == (-1, 3)


def test_legacy_speculators_leave_the_anchor_open(make: Make, tmp_path: Path) -> None:
    folder = rewrite(converted(make(), "speculators", tmp_path / "s"), sample_from_anchor=None)
    draft = read_draft(folder)
    assert draft.reading.anchor_first is None
    with pytest.raises(InputError, match="does not say whether its block drafts from the anchor"):
        draft.config()


def test_causal_sliding_layers_of_speculators_are_refused(make: Make, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    source = make(use_sliding_window=True, sliding_window=16, layer_types=kinds)
    folder = converted(source, "speculators", tmp_path / "s")
    assert read_draft(folder).config() == read_draft(source).config()
    with pytest.raises(InputError, match="causal inside a block"):
        read_draft(rewrite(folder, sliding_window_non_causal=False)).config()


def test_sglang_counts_drafts_not_rows(make: Make, tmp_path: Path) -> None:
    """With an anchor row of its own a block has one row more than SGLang's block_size."""
    folder = rewrite(converted(make(), "sglang", tmp_path / "s"), sample_from_anchor=False)
    assert read_draft(folder).config().block == 6
    again = converted(folder, "sglang", tmp_path / "again")
    assert read_draft(again).config().block == 6 and read_draft(again).reading.anchor_first is False
    other = converted(folder, "speculators", tmp_path / "other")
    assert read_draft(other).config().block == 6 and read_draft(other).reading.anchor_first is False


def test_nested_fields_win_in_sglang(make: Make) -> None:
    folder = make(sample_from_anchor=True, dflash_config={"target_layer_ids": [2, 4], "block_size": 3})
    config = read_draft(folder).config()
    assert (config.target_layer_ids, config.block) == ((2, 4), 3)


@pytest.mark.parametrize("name", ["attention_sink_bias", "causal", "use_swa"])
def test_variations_of_the_backbone_are_refused(name: str, make: Make) -> None:
    folder = make(sample_from_anchor=True, dflash_config={name: True})
    with pytest.raises(InputError, match=f"'{name}' is True in dflash_config"):
        read_draft(folder).config()


def test_bundled_v4(tmp_path: Path) -> None:
    tensors = {"mtp.0.main_proj.weight": torch.ones(2, 2), "model.layers.0.w": torch.ones(2)}
    draft = read_draft(save(tmp_path / "v4", V4, tensors))
    assert draft.format.name == "deepseek-v4" and set(draft.tensors) == {"mtp.0.main_proj.weight"}
    fields = draft.reading.fields
    assert (fields["block_size"], fields["mask_token_id"], fields["num_target_layers"]) == (5, 128799, 43)
    with pytest.raises(InputError, match="DeepSeek-V4 backbone"):
        draft.config()


def test_minimax_prefixes(tmp_path: Path) -> None:
    names = ["language_model.model.dspark.final_norm.weight", "model.dspark.fc.weight", "dspark.layers.0.x"]
    draft = read_draft(save(tmp_path / "m", MINIMAX, {n: torch.ones(2) for n in names}))
    assert set(draft.tensors) == {"norm.weight", "fc.weight", "layers.0.x"}
    fields = draft.reading.fields
    assert (fields["block_size"], fields["target_layer_ids"], fields["hidden_size"]) == (7, [1, 2], 32)


def test_gguf_needs_no_target_if_we_wrote_it(make: Make, tmp_path: Path) -> None:
    folder = converted(make(), "gguf", tmp_path / "g")
    file = folder / "g.gguf"
    assert read_draft(file).config() == read_draft(folder).config()
    (folder / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=r"holds 2 \.gguf files"):
        read_draft(folder)


def test_the_early_gguf_architecture(make: Make, tmp_path: Path) -> None:
    """`dspark` has the same fields under its own prefix."""
    folder = converted(make(), "gguf", tmp_path / "g")
    (folder / "g.gguf").write_bytes((folder / "g.gguf").read_bytes().replace(b"dflash", b"dspark"))
    assert read_draft(folder).config() == read_draft(make()).config()


def test_targets_layers_are_taken_from_the_target(make: Make, tmp_path: Path) -> None:
    folder = rewrite(converted(make(), "speculators", tmp_path / "s"), num_target_layers=None)
    draft = read_draft(folder)
    with pytest.raises(InputError, match="lacks 'num_target_layers'"):
        draft.config()
    assert draft.config(6) == read_draft(make()).config()


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names the architecture \\['LlamaForCausalLM'\\]"):
        read_draft(save(tmp_path / "d", {"architectures": ["LlamaForCausalLM"]}, {"a": torch.ones(1)}))


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden runs at {GOLDEN}; set DSPARK_GOLDEN")
def test_golden_drafts_are_read() -> None:
    kinds = {p.parent.name: read_draft(p).config().markov_head_type for p in GOLDEN.glob("*/draft")}
    assert kinds == {
        "qwen3-vanilla": "vanilla", "qwen3-gated": "gated", "qwen3-rnn": "rnn", "qwen3-dflash": "none",
        "gemma4-vanilla": "vanilla",
    }  # fmt: skip


def test_weights_helper_makes_what_is_expected() -> None:
    assert "lm_head.weight" in weights(QWEN3, reduced=8) and "lm_head.weight" not in weights(QWEN3)
