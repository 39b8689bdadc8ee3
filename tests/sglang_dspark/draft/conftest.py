"""A tiny draft checkpoint with random weights, in any of the forms that a config.json can ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.checkpoints.deepspec import expected_tensors, read_config
from sglang_dspark.draft.load import TargetInfo, load_draft
from sglang_dspark.draft.model import DraftModel

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "hidden_act": "silu",
    "head_dim": 8,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "final_logit_softcapping": 4.0,
}
COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "block_size": 5,
    "mask_token_id": 39,
    "target_layer_ids": [-1, 2],
    "num_target_layers": 4,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}

Write = Callable[..., Path]
Load = Callable[..., DraftModel]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(form, edit=None, **config): a folder with config.json and model.safetensors; `edit` changes the tensors."""

    def make(form: str = "qwen3", edit: Callable[[dict[str, Tensor]], Any] | None = None, **changes: Any) -> Path:
        config = {**COMMON, **(GEMMA4 if form == "gemma4" else QWEN3), **changes}
        folder = tmp_path / "draft"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(1)
        tensors = {
            name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name or "scalar" in name else 0.0)
            for name, shape in expected_tensors(read_config(folder)).items()
            if name not in ("embed_tokens.weight", "lm_head.weight")
        }
        if edit is not None:
            edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def target() -> TargetInfo:
    generator = torch.Generator().manual_seed(2)
    embedding, lm_head = (torch.randn(40, 32, generator=generator) * 0.3 for _ in range(2))
    return TargetInfo(32, 40, 4, embedding, lm_head, "tiny")


@pytest.fixture
def load(target: TargetInfo) -> Load:
    """load(folder, **options) for the tiny target, in float32 on the CPU."""

    def make(folder: Path, of: TargetInfo = target, **options: Any) -> DraftModel:
        merged: dict[str, Any] = {"context_length": 48, **options}
        return load_draft(folder, of, dtype=torch.float32, device=torch.device("cpu"), **merged)

    return make
