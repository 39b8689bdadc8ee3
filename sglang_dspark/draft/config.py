"""The normalised description of a draft model: what every checkpoint format is read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

BACKBONES = ("qwen3", "gemma4")
MARKOV_HEADS = ("none", "vanilla", "gated", "rnn")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `parameters` holds what the type needs besides θ (factor, beta_fast, ...)."""

    type: str = "default"
    theta: float = 10_000.0
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ValueError(f"rope type '{self.type}' is none of {', '.join(ROPE_TYPES)}")
        if self.theta <= 0:
            raise ValueError(f"rope theta must be positive, not {self.theta}")


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention. `window` w limits row p to rows j with |p - j| < w; None attends to everything.
    With `k_eq_v` there is no value projection: the projected keys, before their norm and rotation, are the values."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    k_eq_v: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"the head size must be even, not {self.head_dim}")


def tap_problem(taps: Sequence[int], layers: int | None) -> str | None:
    """What is wrong with tapping the outputs of layers `taps` of a target of `layers` layers, if anything is."""
    listed = list(taps)
    if not listed or any(b <= a for a, b in pairwise(listed)):
        return f"the tapped layers {listed} do not rise"
    if layers is None or (listed[0] >= -1 and listed[-1] < layers):
        return None
    if listed[-1] == layers and listed[0] >= 0:
        return f"the tapped layers {listed} go one past the last of {layers} layers: they look counted as inputs"
    return f"the tapped layers {listed} leave -1..{layers - 1}, the outputs of {layers} layers"


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft model. `block` is γ, the rows of a block and the tokens it drafts; `target_layer_ids` are layers k of the
    target whose outputs are the features, -1 being the embedding's output; `attention` has one entry a layer.
    """

    backbone: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[Attention, ...]
    activation: str
    eps: float
    max_position_embeddings: int
    block: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    markov_head_type: str = "none"
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    softcap: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, in words that follow "... says: ", for a configuration that no draft can have."""
        for name, value, known in (
            ("backbone", self.backbone, BACKBONES),
            ("Markov head", self.markov_head_type, MARKOV_HEADS),
            ("activation", self.activation, ACTIVATIONS),
        ):
            if value not in known:
                raise ValueError(f"the {name} '{value}' is none of {', '.join(known)}")
        if not self.attention:
            raise ValueError("a draft needs at least one layer")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"the mask token id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.block < 1:
            raise ValueError(f"a block needs at least one row, not {self.block}")
        if problem := tap_problem(self.target_layer_ids, self.num_target_layers):
            raise ValueError(problem)
        if (self.markov_rank > 0) != (self.markov_head_type != "none"):
            raise ValueError(f"a '{self.markov_head_type}' Markov head cannot have rank {self.markov_rank}")
        if self.confidence_with_markov and not (self.confidence and self.markov_rank):
            raise ValueError("a confidence head with Markov features needs a confidence head and a Markov head")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"the logit soft cap must be positive, not {self.softcap}")

    @property
    def layers(self) -> int:
        """How many layers the backbone has."""
        return len(self.attention)

    @property
    def feature_size(self) -> int:
        """Width m·d of the target's concatenated features."""
        return len(self.target_layer_ids) * self.hidden_size
