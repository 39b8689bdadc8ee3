"""speculators 0.9: DSparkSpeculator, whose backbone is a Qwen3 configuration in `transformer_layer_config`.

| field | what it is |
|---|---|
| speculators_model_type, architectures | dspark, DSparkSpeculator |
| transformer_layer_config | the backbone; what equals a Qwen3Config's default is left out |
| block_size | rows of a block: γ with sample_from_anchor, one more than γ without |
| aux_hidden_state_layer_ids | k + 1 for the output of layer k: inputs of layers, 0 the embedding |
| mask_token_id, markov_rank, markov_head_type, enable_confidence_head, confidence_head_with_markov | as DeepSpec's |
| sample_from_anchor | true in new files; absent in legacy ones, which draft from the mask rows only; vLLM's adapter of
  these files has long ignored it |
| draft_vocab_size | below transformer_layer_config.vocab_size with d2t [draft] (offsets: id + d2t[id]) and t2d [V] |
| sliding_window_non_causal | false: rows of a block in sliding layers do not see the rows after them |
| num_target_layers | not speculators' own; written here so that files can be judged without the target |

Tensors: DeepSpec's names. Embedding and, for a full vocabulary, lm_head are left out and taken from the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_dspark.checkpoints import safetensors_out
from sglang_dspark.checkpoints.drafts import D2T, Draft, Format, Listed, Reading
from sglang_dspark.checkpoints.outputs import Output, Request
from sglang_dspark.checkpoints.tensors import Virtual
from sglang_dspark.checkpoints.words import brief
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
"""What a Qwen3Config means where its serialised difference from the defaults is silent."""

ROOT = (
    "block_size",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "num_target_layers",
    "draft_vocab_size",
)
ROOT_DEFAULTS: dict[str, Any] = {
    "block_size": 8,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
LAYER_IDS = "aux_hidden_state_layer_ids"
VERSION = "0.9.0"


def recognises(raw: Mapping[str, Any]) -> bool:
    """The model type, or the class where a legacy file lacks it."""
    return raw.get("speculators_model_type") == "dspark" or raw.get("architectures") == ["DSparkSpeculator"]


def read(raw: Mapping[str, Any], tensors: Listed) -> Reading:
    """Flatten the backbone and turn inputs of layers into outputs."""
    layer = raw.get("transformer_layer_config")
    inner = dict(layer) if isinstance(layer, Mapping) else {}
    ids = raw.get(LAYER_IDS)
    fields = {
        **QWEN3_DEFAULTS,
        **{k: v for k, v in inner.items() if v is not None},
        **ROOT_DEFAULTS,
        **{name: raw[name] for name in ROOT if raw.get(name) is not None},
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [i - 1 if type(i) is int else i for i in ids] if isinstance(ids, list) else ids,
    }
    sliding = (
        "sliding_attention" in inner.get("layer_types", []) if isinstance(inner.get("layer_types"), list) else False
    )
    unsupported = []
    if inner.get("model_type", "qwen3") != "qwen3":
        unsupported.append(f"Its backbone is a {brief(inner['model_type'])}, which no supported speculators draft has.")
    if sliding and raw.get("sliding_window_non_causal") is not True:
        unsupported.append("Its sliding layers are causal inside a block, which no engine of this package computes.")
    if sliding:
        fields.setdefault("use_sliding_window", True)
    anchor = raw.get("sample_from_anchor")
    first = anchor if isinstance(anchor, bool) else None
    backbone = {name: f"transformer_layer_config.{name}" for name in QWEN3_DEFAULTS}
    return Reading(fields, {**backbone, "target_layer_ids": LAYER_IDS}, first, tuple(unsupported))


def rename(name: str) -> str | None:
    """DeepSpec's name; t2d says nothing that d2t does not."""
    return None if name in ("t2d", "verifier_norm.weight", "verifier_lm_head.weight") else name


def absolute(d2t: torch.Tensor) -> torch.Tensor:
    """Target ids from the offsets that this format stores."""
    return d2t.long() + torch.arange(len(d2t))


def write(draft: Draft, config: DraftConfig, request: Request) -> Output:
    """The nested spelling. Raises InputError for a backbone that speculators does not have."""
    if config.backbone != "qwen3":
        raise InputError(f"{draft.name} has a Gemma 4 backbone, which speculators' DSpark does not have.")
    source = draft.reading.fields
    skip = (*ROOT, "architectures", "target_layer_ids", "sample_from_anchor", "num_anchors", "dtype")
    layer = {k: v for k, v in source.items() if k not in skip} | {"model_type": "qwen3"}
    first = draft.reading.anchor_first is not False
    vocabulary = draft.reduced or config.vocab_size
    data = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": VERSION,
        "transformer_layer_config": layer,
        "draft_vocab_size": vocabulary,
        "block_size": config.block,
        "mask_token_id": config.mask_token_id,
        LAYER_IDS: [k + 1 for k in config.target_layer_ids],
        "sample_from_anchor": first,
        "sliding_window_non_causal": any(a.window is not None for a in config.attention),
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type if config.markov_rank else "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
        "num_target_layers": config.num_target_layers,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.block if first else config.block - 1}
            ],
            "verifier": {"name_or_path": request.target_name, "architectures": list(request.target_architectures)},
        },
    }
    return safetensors_out.output(draft, data, extra=_maps(draft, config.vocab_size))


def _maps(draft: Draft, full: int) -> dict[str, Virtual]:
    if not draft.reduced:
        return {}
    ids = draft.tensors[D2T].read(0, draft.reduced)
    member = torch.zeros(full, dtype=torch.bool)
    member[ids] = True
    return {D2T: Virtual.of(ids - torch.arange(len(ids))), "t2d": Virtual.of(member)}


FORMAT = Format("speculators", "speculators draft", recognises, read, rename, absolute, write=write)
