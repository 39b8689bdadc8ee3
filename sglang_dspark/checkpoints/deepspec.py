"""DeepSpec: `config.json` of a Qwen3DSparkModel or Gemma4DSparkModel beside safetensors.

This format's spelling is the one used everywhere in this package (`spelling`).

| field | what it is |
|---|---|
| architectures | Qwen3DSparkModel, LingDSparkModel (the same, for Ling targets) or Gemma4DSparkModel |
| block_size | γ: rows of a block and tokens that it drafts |
| mask_token_id | the token of all rows but the first |
| target_layer_ids | layers k whose outputs are tapped, -1 the embedding |
| num_target_layers | the target's number of layers |
| markov_rank, markov_head_type | 0 for none; vanilla, gated or rnn |
| enable_confidence_head, confidence_head_with_markov | whether there is one, and whether it sees W1[x] |
| sample_from_anchor | never written, always true: the anchor's row drafts the first token |
| rope_parameters or rope_theta and rope_scaling, layer_types, sliding_window, ... | as Qwen3 or Gemma 4 have them |

Tensors: `expected_tensors`. The vocabulary is the target's; copies of its embedding and lm_head may be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.checkpoints import safetensors_out, sglang
from sglang_dspark.checkpoints.drafts import Draft, Format, Listed, Reading
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.jsons import read_json
from sglang_dspark.checkpoints.outputs import Output, Request
from sglang_dspark.checkpoints.spelling import ARCHITECTURES, OPTIONAL, expected_tensors, parse_config
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

__all__ = ["ARCHITECTURES", "FORMAT", "OPTIONAL", "expected_tensors", "read_config"]


def read_config(folder: Path) -> DraftConfig:
    """Read `folder`/config.json. Raises InputError that names the field that is missing, malformed or not supported."""
    path = folder / "config.json"
    return parse_config(Fields(read_json(path), path))


def recognises(raw: Mapping[str, Any]) -> bool:
    """One of the classes, and nothing that says that it was written for SGLang."""
    return any(a in ARCHITECTURES for a in sglang.architectures(raw)) and not sglang.recognises(raw)


def read(raw: Mapping[str, Any], tensors: Listed) -> Reading:
    """As it stands."""
    return Reading(raw, {}, raw.get("sample_from_anchor", True) is not False)


def write(draft: Draft, config: DraftConfig, request: Request) -> Output:
    """The configuration without what only other formats say. Raises InputError where it would mean something else."""
    if draft.reading.anchor_first is False:
        raise InputError(
            f"{draft.name} does not draft from the anchor's row, which DeepSpec's format always means; write it as"
            " sglang, speculators or gguf, which have a key for that."
        )
    foreign = ("sample_from_anchor", "draft_vocab_size", "dflash_config", "dspark_config", "auto_map")
    data = {k: v for k, v in draft.reading.fields.items() if k not in foreign}
    data |= {
        "num_target_layers": config.num_target_layers,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    if config.markov_rank == 0:
        data.pop("markov_head_type", None)
    return safetensors_out.output(draft, data)


FORMAT = Format("deepspec", "DeepSpec draft", recognises, read, write=write)
