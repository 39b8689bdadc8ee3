"""config.json of DeepSpec drafts becomes one DraftConfig, whichever spelling it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.checkpoints.deepspec import expected_tensors, read_config
from sglang_dspark.draft.config import Attention, DraftConfig, Rope
from sglang_dspark.errors import InputError

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "block_size": 7,
    "mask_token_id": 99,
    "target_layer_ids": [1, 3],
    "num_target_layers": 6,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
GEMMA4: dict[str, Any] = {
    **{k: v for k, v in QWEN3.items() if k not in ("hidden_act", "rope_parameters")},
    "architectures": ["Gemma4DSparkModel"],
    "hidden_activation": "gelu_pytorch_tanh",
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 30.0,
}


def read(folder: Path, base: dict[str, Any], /, without: str | None = None, **changes: Any) -> DraftConfig:
    data = {k: v for k, v in {**base, **changes}.items() if k != without}
    (folder / "config.json").write_text(json.dumps(data))
    return read_config(folder)


def test_qwen3(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3)
    assert (config.backbone, config.block, config.layers, config.feature_size) == ("qwen3", 7, 3, 64)
    assert config.attention == (Attention(4, 2, 16, Rope("default", 1e6)),) * 3
    assert config.softcap is None


def test_legacy_rope_fields(tmp_path: Path) -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = read(tmp_path, QWEN3, without="rope_parameters", **old)
    assert config.attention[0].rope == Rope("linear", 5e5, {"factor": 2.0})
    assert read(tmp_path, QWEN3, without="rope_parameters", rope_theta=5e5).attention[0].rope == Rope("default", 5e5)
    assert read(tmp_path, QWEN3, without="rope_parameters").attention[0].rope == Rope("default", 1e4)


def test_windows_of_qwen3(tmp_path: Path) -> None:
    def windows(**changes: Any) -> list[int | None]:
        return [a.window for a in read(tmp_path, QWEN3, sliding_window=16, **changes).attention]

    assert windows() == windows(use_sliding_window=False) == [None] * 3
    assert windows(use_sliding_window=True, max_window_layers=1) == [None, 16, 16]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(use_sliding_window=True, layer_types=kinds) == [16, None, None]
    with pytest.raises(InputError, match="no window in use"):
        windows(layer_types=kinds)


def test_both_spellings_of_gemma4(tmp_path: Path) -> None:
    old = read(tmp_path, GEMMA4)
    proportional = Rope("proportional", 1e6, {"partial_rotary_factor": 0.25})
    assert old.attention == (
        Attention(4, 2, 16, Rope("default", 1e4), window=32),
        Attention(4, 1, 64, proportional, k_eq_v=True),
        Attention(4, 1, 64, proportional, k_eq_v=True),
    )
    assert old.softcap == 30.0
    plain = {k: v for k, v in GEMMA4.items() if "global" not in k}
    override = {"head_dim": 64, "num_key_value_heads": 1}
    assert read(tmp_path, plain, per_layer_config={"1": override, "2": override}) == old


def test_global_key_heads_need_shared_keys(tmp_path: Path) -> None:
    assert [a.kv_heads for a in read(tmp_path, GEMMA4, attention_k_eq_v=False).attention] == [2, 2, 2]


def test_dflash_is_a_draft_without_a_markov_head(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3, without="markov_head_type", markov_rank=0, confidence_head_with_markov=False)
    assert config.markov_head_type == "none"
    assert not any("markov" in name for name in expected_tensors(config))


def test_shared_keys_have_no_value_projection(tmp_path: Path) -> None:
    names = expected_tensors(read(tmp_path, GEMMA4))
    assert "layers.0.self_attn.v_proj.weight" in names
    assert "layers.1.self_attn.v_proj.weight" not in names
    assert names["layers.1.self_attn.k_proj.weight"] == (64, 32)


@pytest.mark.parametrize(
    "field",
    [
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "block_size"),
        *("mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank", "markov_head_type"),
        *("enable_confidence_head", "confidence_head_with_markov", "hidden_act", "max_position_embeddings"),
    ],
)
def test_missing_fields_are_named(field: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"lacks '{field}'"):
        read(tmp_path, QWEN3, without=field)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "names the architecture"),
        ({"architectures": None}, "names the architecture"),
        ({"block_size": "7"}, "'block_size' in .* is '7' but must be an integer"),
        ({"block_size": True}, "'block_size' in .* is True"),
        ({"block_size": 0}, "'block_size' in .* is 0"),
        ({"rms_norm_eps": float("nan")}, "finite number"),
        ({"rms_norm_eps": 10**400}, "finite number"),
        ({"block_size": 2**31 - 1}, "an integer of at most 1000"),
        ({"enable_confidence_head": 1}, "true or false"),
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        ({"mask_token_id": 100}, "mask token id 100 is outside the vocabulary of 100"),
        ({"target_layer_ids": []}, "do not rise"),
        ({"target_layer_ids": [3, 1]}, "do not rise"),
        ({"target_layer_ids": [1, "3"]}, "a list of int"),
        ({"target_layer_ids": [1, 6]}, "counted as inputs"),
        ({"target_layer_ids": [-2, 1]}, "leave -1..5"),
        ({"markov_head_type": "lstm"}, "Markov head 'lstm'"),
        ({"markov_rank": 0}, "needs a confidence head and a Markov head"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"head_dim": 15}, "must be even"),
        ({"layer_types": ["full_attention"]}, "for each of 3 layers"),
        ({"layer_types": ["full_attention", "full_attention", "linear"]}, "for each of 3 layers"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope type 'spiral'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "theta must be positive"),
        ({"rope_parameters": [1]}, "must be an object"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as error:
        read(tmp_path, QWEN3, **changes)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_moe_block": True},
        {"hidden_size_per_layer_input": 16},
        {"num_kv_shared_layers": 1},
        {"use_bidirectional_attention": "all"},
    ],
)
def test_gemma4_features_that_no_draft_has_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=next(iter(changes))):
        read(tmp_path, GEMMA4, **changes)


def test_a_soft_cap_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="soft cap must be positive"):
        read(tmp_path, GEMMA4, final_logit_softcapping=-1.0)


def test_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no config"):
        read_config(tmp_path)
