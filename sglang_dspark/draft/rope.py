"""Rotary position tables, for every way of scaling them that drafts use."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_dspark.draft.config import Attention, DraftConfig, Rope
from sglang_dspark.errors import InputError


def inverse_frequencies(config: DraftConfig, attention: Attention) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32 and the factor that scales cosine and sine (1 but for yarn,
    longrope).

    Raises InputError when the rope type lacks a parameter or rotates only part of a head in a way that no backbone has.
    """
    rope, size = attention.rope, attention.head_dim
    # "proportional" pads its frequencies to the whole head with zeros; other types would rotate a narrower tensor.
    if rope.type != "proportional" and rope.parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"The draft's '{rope.type}' rope rotates part of each head, which only 'proportional' rope can do."
        )
    if rope.type == "default":
        return 1.0 / rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    try:
        # The scaling formulas read a configuration object; Qwen3's is the plainest that has all that they ask for.
        carrier = Qwen3Config(
            head_dim=size,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={**rope.parameters, "rope_type": rope.type, "rope_theta": rope.theta},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope.type](carrier)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"The draft's '{rope.type}' rope cannot be computed: {error}; correct its config.json."
        ) from error
    return frequencies, float(factor)


def rope_table(config: DraftConfig, attention: Attention, length: int) -> Tensor:
    """Cosines and signed sines [2, length, head_dim] in float32 for positions 0..length-1, to be used by `rotate`."""
    frequencies, factor = inverse_frequencies(config, attention)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: x·cos + roll(x)·sin, where `sin` carries the minus of its first half. x [..., head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def check_length(config: DraftConfig, context_length: int) -> None:
    """Raise InputError when `context_length` reaches positions where a rope type would change its frequencies as it
    goes.

    Keys cached before the change would no longer match those after it.
    """
    for attention in config.attention:
        limit = _fixed_positions(attention.rope, config.max_position_embeddings)
        if limit is not None and context_length > limit:
            raise InputError(
                f"The draft's '{attention.rope.type}' rope is fixed for {limit} positions only, but the context length"
                f" is {context_length}; choose at most {limit}."
            )


def _fixed_positions(rope: Rope, trained: int) -> int | None:
    match rope.type:
        case "dynamic":
            return trained
        case "longrope":
            return int(rope.parameters.get("original_max_position_embeddings", trained))
        case _:
            return None
