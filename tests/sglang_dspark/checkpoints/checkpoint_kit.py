"""Tiny draft checkpoints with random weights, in DeepSpec's format or converted to another; for these tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_dspark.checkpoints import convert
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.outputs import Request
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.spelling import expected_tensors, parse_config
from sglang_dspark.errors import InputError

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[4] / "shared" / "golden"))
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "block_size": 5,
    "mask_token_id": 63,
    "target_layer_ids": [1, 3],
    "num_target_layers": 6,
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "vocab_size": 64,
    "num_hidden_layers": 6,
}
Make = Callable[..., Path]
ALLOWED = frozenset({"tokenizer"})


def weights(data: dict[str, Any], reduced: int | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Random bfloat16 weights of the draft that `data` describes, else of `QWEN3`; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    try:
        config = parse_config(Fields(data, "a test"))
    except InputError:
        config = parse_config(Fields(QWEN3, "a test"))
    return {
        name: (torch.randn(shape, generator=generator) * 0.3 + float("norm" in name)).to(torch.bfloat16)
        for name, shape in expected_tensors(config, reduced).items()
        if name != "embed_tokens.weight" and (reduced or name != "lm_head.weight")
    }


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def converted(source: Path, to: str, out: Path, request: Request | None = None, **options: Any) -> Path:
    """`source` written as `to` into `out`."""
    draft = read_draft(source)
    output = convert.plan(draft, to, request or Request(), options.get("layers"))
    convert.check_losses(output, frozenset({loss.name for loss in output.losses} & options.get("allow", ALLOWED)))
    return convert.write(draft, to, output, out).folder


def rewrite(folder: Path, **changes: Any) -> Path:
    """Change fields of a folder's config.json; None removes one."""
    file = folder / "config.json"
    data = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return folder
