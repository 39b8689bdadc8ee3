"""SpecForge 0.2: a Qwen3 configuration whose DSpark fields are nested in `dflash_config`.

| field | what it is |
|---|---|
| architectures | DSparkDraftModel |
| block_size | γ, at the root |
| dflash_config.mask_token_id, .target_layer_ids | as DeepSpec's |
| dflash_config.markov_rank, .markov_head_type | 0 and vanilla where absent |
| dflash_config.enable_confidence_head | where absent: whether confidence_head_alpha is above 0 |
| dflash_config.confidence_head_with_markov | false where absent, unlike everywhere else |
| dflash_config.projector_type | dspark |
| sample_from_anchor | never written; training predicts the first token from the anchor's row |

Tensors: DeepSpec's names without embedding and lm_head; early ones put the heads under `logit_head.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.checkpoints import safetensors_out, sglang
from sglang_dspark.checkpoints.drafts import Draft, Format, Listed, Reading
from sglang_dspark.checkpoints.outputs import Output, Request
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

NESTED = (
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def recognises(raw: Mapping[str, Any]) -> bool:
    """The class, with its fields nested."""
    return "DSparkDraftModel" in sglang.architectures(raw)


def read(raw: Mapping[str, Any], tensors: Listed) -> Reading:
    """Hoist the nested fields, with SpecForge's defaults."""
    inner = sglang.nested(raw)
    alpha = inner.get("confidence_head_alpha", 0)
    fields = {
        **{k: v for k, v in raw.items() if k not in ("dflash_config", "auto_map")},
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": isinstance(alpha, int | float) and alpha > 0,
        "confidence_head_with_markov": False,
        **{name: inner[name] for name in NESTED if inner.get(name) is not None},
    }
    if inner.get("block_size") is not None:
        fields["block_size"] = inner["block_size"]
    spelled = {name: f"dflash_config.{name}" for name in NESTED}
    return Reading(fields, spelled, True, sglang.variations(inner, "dflash_config"))


def rename(name: str) -> str:
    """DeepSpec's name."""
    return name.removeprefix("logit_head.")


def write(draft: Draft, config: DraftConfig, request: Request) -> Output:
    """The nested spelling. Raises InputError for what SpecForge has no model for."""
    if config.backbone != "qwen3":
        raise InputError(f"{draft.name} has a Gemma 4 backbone, which SpecForge has no DSpark model for.")
    if draft.reading.anchor_first is False:
        raise InputError(f"{draft.name} does not draft from the anchor's row, which SpecForge's DSpark always does.")
    heads, kv = config.attention[0].heads, config.attention[0].kv_heads
    inner = {name: draft.reading.fields[name] for name in NESTED if draft.reading.fields.get(name) is not None}
    data = {k: v for k, v in draft.reading.fields.items() if k not in (*NESTED, "sample_from_anchor")}
    data |= {
        "architectures": ["DSparkDraftModel"],
        "num_target_layers": config.num_target_layers,
        "dflash_config": {"projector_type": "dspark", "attention_mode": "mha" if heads == kv else "gqa", **inner},
    }
    return safetensors_out.output(draft, data)


FORMAT = Format("specforge", "SpecForge draft", recognises, read, rename, write=write)
