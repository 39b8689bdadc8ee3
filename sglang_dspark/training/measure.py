"""How good a head is on held-out text, without decoding: what a block after each anchor would have had accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.training.features import Reading
from sglang_dspark.training.model import TrainableDraft


@dataclass(frozen=True, slots=True)
class Quality:
    """Over the measured anchors: `accepted_length` is τ, the bonus token included; `conditional` [γ] the share of
    position k that was accepted among those whose predecessors were; `calibration_error` of the confidence, over
    those positions, in ten bins.
    """

    accepted_length: float
    conditional: tuple[float, ...]
    calibration_error: float | None
    anchors: int


@torch.no_grad()
def greedy_blocks(model: TrainableDraft, lm_head: Tensor, reading: Reading, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [N, γ] that decoding would draft after `anchors` [N], and their confidence [N, γ] (ones without a
    head).
    """
    rows = model.config.block
    hidden = model(reading.features.float(), reading.tokens, anchors, rows)
    previous = reading.tokens[anchors]
    drafted, sure = [], []
    state = None
    for k in range(rows):
        logits = hidden[:, k] @ lm_head.T
        judged = hidden[:, k]
        if (head := model.markov_head) is not None:
            z = head.markov_w1(previous)
            if head.kind == "rnn":
                state, latent = head.step(torch.zeros_like(z) if state is None else state, z, hidden[:, k])
            else:
                latent = head.latent(z[:, None], hidden[:, k : k + 1])[:, 0]
            logits = logits + head.markov_w2(latent)
            if model.config.confidence_with_markov:
                judged = torch.cat([judged, z], -1)
        previous = logits.argmax(-1)
        drafted.append(previous)
        sure.append(
            torch.ones_like(judged[:, 0]) if model.confidence_head is None else model.confidence_head(judged).sigmoid()
        )
    return torch.stack(drafted, 1), torch.stack(sure, 1)


def quality(
    model: TrainableDraft, lm_head: Tensor, readings: Iterable[tuple[Reading, int]], anchors_each: int = 24
) -> Quality:
    """Greedy acceptance over (reading, where its answer begins) pairs, at evenly spaced anchors of the answers.

    Token k is accepted if it is the target's likeliest after the text; the text has to go on with it for token k + 1
    to be judged, so that sampled text counts less for later positions.
    """
    block = model.config.block
    device = lm_head.device
    tried, kept, sums = (torch.zeros(size, device=device) for size in (block, block, (3, 10)))
    lengths, count = 0.0, 0
    for reading, answer in readings:
        last = len(reading.tokens) - 1 - block
        if last <= answer:
            continue
        anchors = torch.linspace(answer, last, min(anchors_each, last - answer + 1)).long().to(device)
        drafted, sure = greedy_blocks(model, lm_head, reading, anchors)
        at = anchors[:, None] + torch.arange(block, device=device)
        right = drafted == reading.top[at, 0]
        follows = drafted == reading.tokens[at + 1]
        alive = (right & follows).cumprod(1).bool().roll(1, 1)
        alive[:, 0] = True
        tried += alive.sum(0)
        kept += (alive & right).sum(0)
        lengths += float((alive & right).sum()) + len(anchors)
        count += len(anchors)
        bins = (sure[alive] * 10).long().clamp(0, 9)
        for row, values in enumerate((torch.ones_like(sure[alive]), sure[alive], right[alive].float())):
            sums[row].index_add_(0, bins, values)
    error = None
    if model.confidence_head is not None and count:
        error = float((sums[1] - sums[2]).abs().sum() / sums[0].sum())
    return Quality(
        accepted_length=lengths / max(1, count),
        conditional=tuple((kept / tried.clamp_min(1)).tolist()),
        calibration_error=error,
        anchors=count,
    )
