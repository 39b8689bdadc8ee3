"""What training will need in memory, said beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dspark.training.features import TOP
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.train import Recipe

FLOAT, HALF = 4, 2


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory."""

    name: str
    bytes: int


def training_memory(
    model: TrainableDraft, target: Any, recipe: Recipe, longest: int, feature_budget: int, threads: int = 1
) -> tuple[Part, ...]:
    """Parts of the peak: weights, gradients, optimiser and average, activations of sequences, kept features.

    `longest` is the longest sequence in tokens; `target` the transformers model; `threads` as in `Trainer`.
    """
    config = model.config
    weights = sum(p.numel() for p in model.parameters()) * FLOAT
    theirs = sum(p.numel() * p.element_size() for p in target.parameters())
    rows = recipe.anchors * config.block
    columns = min(config.vocab_size, longest * TOP // 4 + recipe.vocabulary_sample)
    attention = config.attention[0]
    # Of each layer: attention weights over context and block twice (scores and their softmax), and the widths that
    # the backward pass looks at again.
    scores = 2 * attention.heads * rows * (longest + config.block)
    widths = rows * (8 * config.hidden_size + 4 * config.intermediate_size + 4 * attention.heads * attention.head_dim)
    # Logits with and without the Markov bias, the softmax of both groups, and as many gradients again.
    activations = config.layers * (scores + widths) + 6 * rows * columns + columns * config.hidden_size
    reading = longest * (config.feature_size * (HALF + FLOAT) + 64 * config.vocab_size // longest)
    return (
        Part("target", theirs),
        Part("lm_head and embedding for training", 2 * config.vocab_size * config.hidden_size * FLOAT),
        Part("head, gradients, optimiser, average", 5 * weights),
        Part("activations, and gradients of a sequence", threads * (activations * FLOAT + weights)),
        Part("reading sequences", threads * reading * FLOAT),
        Part("kept features, at most", feature_budget),
    )
