"""MiniMax M3 drafts, as SGLang reads them: DSparkMiniMaxDraftModel.

| field | what it is |
|---|---|
| text_config | the target's, perhaps; its fields count as the root's |
| dspark_block_size, dspark_noise_token_id, dspark_markov_rank, dspark_markov_head_type | γ, mask, Markov head |
| dflash_config.target_layer_ids, .num_target_layers, .num_hidden_layers | taps and layers |
| dspark_config.use_dense_ffn, .ffn_hidden_size | the draft's feed-forward |

Tensors: under `language_model.model.dspark.`, `model.dspark.` or `dspark.`, with `final_norm` for DeepSpec's `norm` and
`block_sparse_moe` for `mlp`. The backbone is MiniMax's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.checkpoints import deepseek_v4, sglang
from sglang_dspark.checkpoints.drafts import Format, Listed, Reading

PREFIXES = ("language_model.model.dspark.", "model.dspark.", "dspark.")


def recognises(raw: Mapping[str, Any]) -> bool:
    """The class."""
    return "DSparkMiniMaxDraftModel" in sglang.architectures(raw)


def read(raw: Mapping[str, Any], tensors: Listed) -> Reading:
    """Flatten the nested parts and drop the prefix."""
    text = raw.get("text_config")
    flat = {**(text if isinstance(text, Mapping) else {}), **raw}
    reading = deepseek_v4.read(flat, tensors)
    inner = sglang.nested(flat)
    names = ("target_layer_ids", "num_target_layers", "num_hidden_layers")
    fields = dict(reading.fields) | {name: inner[name] for name in names if name in inner}
    spelled = dict(reading.spelled) | {name: f"dflash_config.{name}" for name in names}
    return Reading(fields, spelled, reading.anchor_first)


def rename(name: str) -> str:
    """DeepSpec's name, as far as there is one."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix).replace("block_sparse_moe", "mlp").replace("final_norm", "norm")
    return name


FORMAT = Format("minimax", "MiniMax M3 draft", recognises, read, rename, foreign="MiniMax M3")
