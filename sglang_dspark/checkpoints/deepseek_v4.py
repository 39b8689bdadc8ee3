"""DeepSeek-V4's bundled DSpark module: part of the target's own checkpoint.

| field | what it is |
|---|---|
| dspark_block_size | γ, 5 |
| dspark_noise_token_id | the mask, 128799 |
| dspark_target_layer_ids | layers k whose outputs are tapped; one stage of the module for each |
| dspark_markov_rank, dspark_markov_head_type | 256; vanilla where absent |
| num_hidden_layers | the target's number of layers |
| num_nextn_predict_layers | 1 or 3: stages of prediction, not the block |
| sample_from_anchor | absent, always true |

Tensors: `mtp.STAGE.*`, of which the index lists the files; the heads are in the last stage, the confidence head has no
bias. The backbone is V4's own (latent attention, experts, hyper-connections), so no other format can hold the module;
it can be taken out of the checkpoint as it is, which needs none of the target's other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.checkpoints.drafts import Format, Listed, Reading

PREFIXED = ("block_size", "target_layer_ids", "markov_rank", "markov_head_type")


def recognises(raw: Mapping[str, Any]) -> bool:
    """Any of the prefixed fields."""
    return any(raw.get(f"dspark_{name}") is not None for name in PREFIXED)


def read(raw: Mapping[str, Any], tensors: Listed) -> Reading:
    """Drop the prefix."""
    spelled = {name: f"dspark_{name}" for name in PREFIXED} | {"mask_token_id": "dspark_noise_token_id"}
    fields = dict(raw) | {name: raw.get(stored) for name, stored in spelled.items()}
    fields |= {
        "num_target_layers": raw.get("num_hidden_layers"),
        "markov_head_type": fields["markov_head_type"] or "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return Reading(fields, spelled, raw.get("sample_from_anchor") is not False)


FORMAT = Format(
    "deepseek-v4",
    "DeepSeek-V4 checkpoint with its own DSpark module",
    recognises,
    read,
    prefix="mtp.",
    foreign="DeepSeek-V4",
)
