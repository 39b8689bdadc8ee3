"""The objective: L = 0.1·CE + 0.9·TV + 1.0·BCE(confidence), position k weighted by exp(-(k-1)/γ) (DSpark, training).

Over a large vocabulary the product with lm_head would be most of the work, so softmax is over the tokens that the
target finds likely somewhere in the sequence and a random sample of the others, which stands for all of them (its
weight makes the normaliser's expectation exact). The target's distribution is its likeliest tokens and one lump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.training.features import Reading, lump
from sglang_dspark.training.model import TrainableDraft


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the three terms."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Sums over the rows that count, each times its position's weight; `rows` is the sum of those weights."""

    loss: Tensor
    ce: float
    tv: float
    confidence: float
    rows: float


@dataclass(frozen=True, slots=True)
class Columns:
    """The part of the vocabulary that softmax runs over: `ids` [C] sorted tokens that matter, `others` [n] a sample of
    the rest, each standing for e^`weight` tokens.
    """

    ids: Tensor
    others: Tensor
    weight: float

    @classmethod
    def of(cls, reading: Reading, vocab: int, sample: int, generator: torch.Generator) -> Columns:
        """`sample` others at most; 0 or too many takes the whole vocabulary."""
        device = reading.tokens.device
        ids = torch.cat([reading.top.flatten().long(), reading.tokens]).unique()  # type: ignore[no-untyped-call]
        left = vocab - len(ids)
        if not 0 < sample < left:
            return cls(torch.arange(vocab, device=device), torch.empty(0, dtype=torch.long, device=device), 0.0)
        drawn = torch.randint(vocab, (sample + sample // 4,), generator=generator).to(device)
        drawn = drawn.unique()  # type: ignore[no-untyped-call]
        others = drawn[~torch.isin(drawn, ids)][:sample]
        return cls(ids, others, math.log(left / max(1, len(others))))


def block_rows(reading: Reading, anchors: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Positions [N, rows] of the tokens that the rows of a block follow (the anchor's first), cut at the end of the
    sequence, and which of them have a token after them, which is what they are to draft.
    """
    at = anchors[:, None] + torch.arange(rows, device=anchors.device)
    last = len(reading.tokens) - 2
    return at.clamp_max(last), at <= last


def objective(
    model: TrainableDraft,
    lm_head: Tensor,
    reading: Reading,
    anchors: Tensor,
    rows: int,
    columns: Columns,
    weights: Weights,
) -> Terms:
    """The loss of blocks of `rows` after `anchors` [N]; `lm_head` [V, d] is the target's."""
    hidden = model(reading.features.float(), reading.tokens, anchors, rows)
    at, counts = block_rows(reading, anchors, rows)
    latent, confidence = model.latent(hidden, reading.tokens[at])
    weight = torch.exp(-torch.arange(rows, device=at.device) / model.config.block).expand_as(at)[counts]

    everything = torch.cat([columns.ids, columns.others])
    logits = hidden[counts] @ lm_head[everything].T
    if model.markov_head is not None and latent is not None:
        logits = logits + latent[counts] @ model.markov_head.markov_w2.weight[everything].T
    if model.config.softcap is not None:
        logits = torch.tanh(logits / model.config.softcap) * model.config.softcap
    split = len(columns.ids)
    total = logits.logsumexp(-1, keepdim=True)
    if len(columns.others):
        head, rest = logits[:, :split].logsumexp(-1), logits[:, split:].logsumexp(-1) + columns.weight
        total = torch.logaddexp(head, rest)[:, None]
    where = at[counts]
    label = torch.searchsorted(columns.ids, reading.tokens[where + 1])
    ce = (total.squeeze(1) - logits.gather(1, label[:, None]).squeeze(1)) * weight
    q = (logits.gather(1, torch.searchsorted(columns.ids, reading.top[where].long())) - total).exp()
    p = reading.p[where].float()
    distance = ((p - q).abs().sum(-1) + (lump(p) - lump(q)).abs().squeeze(-1)) / 2
    tv = distance * weight
    loss = weights.ce * ce.sum() + weights.tv * tv.sum()
    judged = 0.0
    if confidence is not None:
        target = (1 - distance).detach().clamp(0, 1)
        bce = F.binary_cross_entropy_with_logits(confidence[counts], target, weight, reduction="sum")
        loss = loss + weights.confidence * bce
        judged = bce.item()
    return Terms(loss, ce.sum().item(), tv.sum().item(), judged, weight.sum().item())
