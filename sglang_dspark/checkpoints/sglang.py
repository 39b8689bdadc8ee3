"""SGLang's native view (0.5.23): what its DSPARK worker reads, at the root of config.json.

| field | what it is |
|---|---|
| architectures | Qwen3DSparkModel, LingDSparkModel or DSparkDraftModel; the class alone decides what loads it |
| block_size | γ, the tokens drafted; with sample_from_anchor false the block has one row more |
| mask_token_id, target_layer_ids, num_target_layers, block_size | dflash_config's win over the root's |
| markov_rank, markov_head_type | parsed from dflash_config too, but built from the root only |
| enable_confidence_head | only whether the key is there is looked at, never its value |
| confidence_head_with_markov | root only; true where absent |
| sample_from_anchor | true where absent |

Tensors: DeepSpec's names, perhaps under `model.`. Embedding and lm_head are always the target's; copies are skipped.
Missing tensors of the backbone are not noticed when SGLang loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.checkpoints import safetensors_out
from sglang_dspark.checkpoints.drafts import Draft, Format, Listed, Reading
from sglang_dspark.checkpoints.outputs import Output, Request
from sglang_dspark.checkpoints.words import brief
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")
NESTED = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
"""Fields that dflash_config or dspark_config may hold, and which then count."""

# Variations of the backbone that are announced in dflash_config, with the values that switch each off.
ABSENT: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (False, None),
    "attention_value_scale": (None, 1.0, 1),
    "causal": (False, None),
    "conv_kernel_size": (0, None),
    "selector_rank": (0, None),
    "output_multiplier": (1.0, 1, None),
    "use_swa": (False, None),
    "final_logit_softcapping": (0, 0.0, None),
}


def recognises(raw: Mapping[str, Any]) -> bool:
    """A DSpark class with its Markov head at the root, and a sign that it was written for SGLang."""
    names = architectures(raw)
    plain = "DSparkDraftModel" in names or "sample_from_anchor" in raw or nested(raw) != {}
    return any(a in names for a in ARCHITECTURES) and "markov_rank" in raw and plain


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """The names in `architectures`, whatever is there."""
    listed = raw.get("architectures")
    return [a for a in listed if isinstance(a, str)] if isinstance(listed, list) else []


def nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """dflash_config and dspark_config as one, the latter winning, as SGLang merges them."""
    both = [raw.get(name) for name in ("dflash_config", "dspark_config")]
    return {k: v for part in both if isinstance(part, Mapping) for k, v in part.items()}


def variations(inner: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A sentence for each variation of the backbone that `inner` switches on."""
    return tuple(
        f"'{name}' is {brief(inner[name])} in {where}, which no supported draft has."
        for name, off in ABSENT.items()
        if name in inner and inner[name] not in off
    )


def read(raw: Mapping[str, Any], tensors: Listed) -> Reading:
    """Hoist what counts from dflash_config, and count rows of the block rather than drafts."""
    inner = nested(raw)
    fields = {**raw, **{name: inner[name] for name in NESTED if inner.get(name) is not None}}
    fields["architectures"] = ["Qwen3DSparkModel"]
    fields.setdefault("enable_confidence_head", True)
    fields.setdefault("confidence_head_with_markov", bool(fields.get("markov_rank")))
    first = raw.get("sample_from_anchor", True) is not False
    if not first and type(fields.get("block_size")) is int:
        fields["block_size"] += 1
    spelled = {name: f"dflash_config.{name}" for name in NESTED if inner.get(name) is not None}
    return Reading(fields, spelled, first, variations(inner, "dflash_config"))


def rename(name: str) -> str:
    """DeepSpec's name."""
    return name.removeprefix("model.")


def write(draft: Draft, config: DraftConfig, request: Request) -> Output:
    """The root view. Raises InputError for what SGLang cannot draft with at all."""
    if config.backbone != "qwen3":
        raise InputError(
            f"{draft.name} has a Gemma 4 backbone, which SGLang 0.5.23 has no class for; run it on the PyTorch engine."
        )
    if not config.markov_rank:
        raise InputError(
            f"{draft.name} has no Markov head, which SGLang's DSPARK needs; use SGLang's DFLASH algorithm for it."
        )
    taps = config.target_layer_ids
    if taps[0] < 0 or taps[-1] == config.num_target_layers - 1:
        raise InputError(
            f"{draft.name} taps {list(taps)} of {config.num_target_layers} layers; SGLang can tap neither the embedding"
            " nor the last layer, so this draft cannot be written for it."
        )
    data = dict(draft.reading.fields)
    first = draft.reading.anchor_first is not False
    data |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block if first else config.block - 1,
        "num_target_layers": config.num_target_layers,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
        "sample_from_anchor": first,
    }
    for name in ("dflash_config", "dspark_config", "auto_map", "draft_vocab_size"):
        data.pop(name, None)
    return safetensors_out.output(draft, data)


FORMAT = Format("sglang", "draft in SGLang's native view", recognises, read, rename, write=write)
