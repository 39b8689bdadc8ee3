"""Targets and drafts of given shapes with random weights, made where they run: what they cost is real, what they say
is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from local_runner.engines.torch.target import LeanTarget
from local_runner.measure import parameters_read
from sglang_dspark.checkpoints.deepspec import expected_tensors
from sglang_dspark.draft.backbone import Backbone
from sglang_dspark.draft.config import Attention, DraftConfig, Rope
from sglang_dspark.draft.heads import Heads
from sglang_dspark.draft.model import DraftModel


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 target and its DSpark head, whose layers are shaped as the target's. `taps` are layers of the target."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    taps: tuple[int, ...]
    draft_layers: int
    rank: int
    block: int = 7


_QWEN3_TAPS = (1, 9, 17, 25, 33)
QWEN3_4B = Shape("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151_936, True, _QWEN3_TAPS, 5, 256)
QWEN3_8B = Shape("Qwen3-8B", 4096, 12_288, 36, 32, 8, 128, 151_936, False, _QWEN3_TAPS, 5, 256)


@dataclass(frozen=True, slots=True)
class RandomPair:
    """A target, its draft, and how many parameters a step of each reads: the draft's with the target's lm_head, and
    its W2 once for every drafted token.
    """

    target: LeanTarget
    draft: DraftModel
    target_parameters: int
    draft_parameters: int


def random_pair(shape: Shape, device: torch.device, dtype: torch.dtype, context_length: int) -> RandomPair:
    """Make both on `device`; the host's memory holds neither."""
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(context_length, 4096),
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    parameters = parameters_read({name: p.numel() for name, p in model.named_parameters()})
    target = LeanTarget(model, context_length)
    target.taps = shape.taps
    draft, draft_parameters = _random_draft(shape, target)
    return RandomPair(target, draft, parameters, draft_parameters)


def draft_config(shape: Shape, context_length: int) -> DraftConfig:
    """The head of `shape`: vanilla Markov and confidence with Markov features, as the published ones are."""
    attention = Attention(shape.heads, shape.kv_heads, shape.head_dim, Rope(theta=1_000_000.0))
    return DraftConfig(
        backbone="qwen3",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        attention=(attention,) * shape.draft_layers,
        activation="silu",
        eps=1e-6,
        max_position_embeddings=context_length,
        block=shape.block,
        mask_token_id=shape.vocab - 1,
        target_layer_ids=shape.taps,
        num_target_layers=shape.layers,
        markov_head_type="vanilla",
        markov_rank=shape.rank,
        confidence=True,
        confidence_with_markov=True,
    )


def _random_draft(shape: Shape, target: LeanTarget) -> tuple[DraftModel, int]:
    config = draft_config(shape, target.context_length)
    shapes = expected_tensors(config)

    def take(name: str) -> Tensor:
        like = torch.empty(shapes[name], dtype=target.embedding.dtype, device=target.device)
        return like.fill_(1.0) if name.endswith("norm.weight") else like.normal_(0.0, 0.02)

    positions = target.context_length + config.block
    backbone = Backbone(config, take, target.embedding, target.lm_head, positions, target.project)
    draft = DraftModel(config, backbone, Heads(config, take), config.block, target.context_length, [])
    sizes = {name: torch.Size(size).numel() for name, size in shapes.items()}
    w2 = sizes["markov_head.markov_w2.weight"]
    looked_up = sizes["markov_head.markov_w1.weight"]
    return draft, parameters_read(sizes) - looked_up + (config.block - 1) * w2
