"""A head's shape for a target, and its checkpoint folder in DeepSpec's format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_dspark.checkpoints.deepspec import read_config
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.fit import ready
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.spelling import parse_config
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError
from sglang_dspark.training.features import tap_layers
from sglang_dspark.training.model import TrainableDraft

TRAINING = "training.json"
"""How a head was made, beside its weights."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one chooses of a head; the rest follows from the target."""

    layers: int = 2
    block: int = 7
    markov: str = "vanilla"
    rank: int = 64
    confidence: bool = True
    taps: tuple[int, ...] = ()
    """Layers k of the target whose outputs are the features; none given: five over the depth."""


def head_fields(target: Any, shape: Shape, mask_token_id: int) -> dict[str, Any]:
    """config.json of a head of `shape` for a transformers configuration `target`.

    Raises InputError for a shape that no head can have.
    """
    text = target.get_text_config()
    heads = text.num_attention_heads
    rope = dict(getattr(text, "rope_parameters", None) or {})
    plain = rope if "rope_theta" in rope else {}  # rope by layer type, as Gemma has it, is not a draft's
    data = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        # GGUF files give it in float32, with digits that nobody wrote.
        "rms_norm_eps": float(f"{getattr(text, 'rms_norm_eps', 1e-6):.6g}"),
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(plain.get("rope_theta", 10_000.0))},
        "tie_word_embeddings": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "block_size": shape.block,
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(shape.taps or tap_layers(text.num_hidden_layers)),
        "num_target_layers": text.num_hidden_layers,
        "markov_rank": shape.rank if shape.markov != "none" else 0,
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence and shape.markov != "none",
    }
    if shape.markov != "none":
        data["markov_head_type"] = shape.markov
    return data


def head_config(fields: Mapping[str, Any]) -> DraftConfig:
    """`fields` as the readers of checkpoints understand them. Raises InputError that names what cannot be."""
    return parse_config(Fields(dict(fields), Path("config.json")))


def mask_token(tokenizer: Any, vocab: int) -> int:
    """A token that text does not hold: one beyond the tokenizer's own if the target has room for it, or its unknown or
    padding token, or the first.
    """
    if tokenizer is None:
        return 0
    if len(tokenizer) < vocab:
        return len(tokenizer)
    known = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("unk", "pad"))
    return next((t for t in known if t is not None and t != tokenizer.eos_token_id), 0)


def mask_of(head: Path) -> int:
    """The token in the masked rows of the head at `head`."""
    return read_draft(head).config(None).mask_token_id


def begin_with(model: TrainableDraft, head: Path, layers: int) -> None:
    """Give `model` the weights of the head at `head` (of any format) for a target of `layers` layers.

    Raises InputError for a head of another shape, naming what differs.
    """
    checkpoint = read_draft(head)
    config, tensors = ready(checkpoint, layers)
    mine = asdict(model.config)
    differs = sorted(name for name, value in asdict(config).items() if mine[name] != value)
    if differs:
        raise InputError(
            f"{head} cannot be trained on as this head: {', '.join(differs)} differ; give the shape it has, or begin"
            " anew."
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.load(name))


def export(model: TrainableDraft, fields: Mapping[str, Any], provenance: Mapping[str, Any], out: Path) -> None:
    """Write config.json, model.safetensors in bfloat16 and training.json into `out`; each file appears whole."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in model.state_dict().items()}
    part = out / ".writing"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    save_file(tensors, part / "model.safetensors", {"format": "pt"})
    (part / "config.json").write_text(json.dumps(dict(fields), indent=1) + "\n", encoding="utf-8")
    (part / TRAINING).write_text(json.dumps(dict(provenance), indent=1) + "\n", encoding="utf-8")
    # Weights last: a folder that lacks them is refused, one with another's configuration might not be.
    for name in (TRAINING, "config.json", "model.safetensors"):
        (part / name).replace(out / name)
    part.rmdir()
    if read_config(out) != head_config(fields):
        raise InputError(f"The head in {out} does not read back as it was written; check the disk and train again.")
