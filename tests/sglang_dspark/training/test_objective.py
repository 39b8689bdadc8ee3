"""The loss against a slow and obviously right one, made from the engine's draft and loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from sglang_dspark.training.objective import Columns, Weights, objective

TOKENS = [(11 * i + i * i) % 60 for i in range(24)]
ALL = Columns(torch.arange(60), torch.empty(0, dtype=torch.long), 0.0)


@pytest.mark.parametrize("shape", [{}, {"markov": "rnn"}, {"markov": "none"}, {"confidence": False}])
@pytest.mark.parametrize("rows", [4, 2])
def test_it_is_the_papers(head: Callable, shape: dict, rows: int) -> None:
    made = head(**shape)
    reading = made.read(TOKENS)  # all 60 tokens are among the likeliest 64, so that distributions are complete
    anchors = torch.tensor([3, 9, 21])  # the last block sticks out of the text
    ce = tv = bce = total = 0.0
    for at in anchors.tolist():
        made.engine.reset()
        made.engine.observe(reading.features[:at].float(), 0)
        made.engine._tokens = made.engine._tokens[:rows]
        made.engine._offsets = made.engine._offsets[:rows]
        made.engine.block = rows
        text = [*TOKENS, 0, 0, 0, 0]
        block = made.engine.draft(TOKENS[at], at, lambda k, _, at=at, text=text: text[at + 1 + k])
        for k in range(rows):
            if at + 1 + k >= len(TOKENS):
                break
            q = block.logits[k].softmax(-1)
            p = torch.zeros(60).index_add(0, reading.top[at + k].long(), reading.p[at + k].float())
            w = math.exp(-k / 4)
            d = 0.5 * (p - q).abs().sum().item()
            ce += -w * math.log(q[TOKENS[at + 1 + k]].item())
            tv += w * d
            total += w
            if block.confidence_logits:
                c = 1 / (1 + math.exp(-block.confidence_logits[k]))
                bce += -w * ((1 - d) * math.log(c) + d * math.log(1 - c))
    terms = objective(made.model, made.lm_head, reading, anchors, rows, ALL, Weights())
    assert terms.rows == pytest.approx(total)
    assert terms.ce == pytest.approx(ce, rel=1e-4)
    assert terms.tv == pytest.approx(tv, rel=1e-3)  # p is kept in half precision
    assert terms.confidence == pytest.approx(bce, rel=1e-3)
    assert terms.loss.item() == pytest.approx(0.1 * ce + 0.9 * tv + bce, rel=1e-3)


@pytest.mark.parametrize("shape", [{}, {"markov": "gated"}, {"markov": "rnn"}])
def test_gradients_are_the_losss_slope(head: Callable, shape: dict) -> None:
    made = head(**shape)
    reading = made.read(TOKENS)
    anchors = torch.tensor([3, 9, 14])
    weights = Weights(confidence=0.0)  # its label is a constant of the step, by design

    def loss() -> torch.Tensor:
        return objective(made.model, made.lm_head, reading, anchors, 4, ALL, weights).loss

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in made.model.named_parameters():
        if parameter.grad is None:
            assert name.startswith("confidence_head")
            continue
        direction = torch.randn(parameter.shape, generator=generator) / parameter.numel() ** 0.5
        slope = (parameter.grad * direction).sum().item()
        with torch.no_grad():
            parameter += 2e-3 * direction
            above = loss().item()
            parameter -= 4e-3 * direction
            below = loss().item()
            parameter += 2e-3 * direction
        assert (above - below) / 4e-3 == pytest.approx(slope, abs=0.03 * max(1.0, abs(slope))), name


def test_confidence_does_not_pull_at_its_label(head: Callable) -> None:
    made = head()
    reading = made.read(TOKENS)
    only = Weights(ce=0.0, tv=0.0, confidence=1.0)
    objective(made.model, made.lm_head, reading, torch.tensor([3, 9]), 4, ALL, only).loss.backward()
    assert (
        made.model.markov_head.markov_w2.weight.grad is None or not made.model.markov_head.markov_w2.weight.grad.any()
    )
    assert made.model.confidence_head.proj.weight.grad.any()


def test_a_sample_stands_for_the_rest_of_the_vocabulary(head: Callable) -> None:
    made = head()
    reading = made.read(TOKENS)
    few = torch.tensor(sorted({*TOKENS, 1, 2, 3}))
    # Only ten likely tokens are kept here, as in a large vocabulary, and all of them are columns.
    object.__setattr__(reading, "top", few[:10].int().expand(len(TOKENS), 10).contiguous())
    object.__setattr__(reading, "p", torch.full((len(TOKENS), 10), 0.05, dtype=torch.half))
    at = torch.tensor([9])  # one row of weight 1: the cross entropy is log Z less a constant, and E[Z] is to be exact
    exact = objective(made.model, made.lm_head, reading, at, 1, ALL, Weights(confidence=0.0)).ce
    rest = torch.tensor([t for t in range(60) if t not in set(few.tolist())])
    assert len(rest) >= 12
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for _ in range(500):
        chosen = rest[torch.randperm(len(rest), generator=generator)[:6]]
        columns = Columns(few, chosen, math.log(len(rest) / 6))
        sampled = objective(made.model, made.lm_head, reading, at, 1, columns, Weights(confidence=0.0)).ce
        ratios.append(math.exp(sampled - exact))
    spread = (sum((r - 1) ** 2 for r in ratios) / len(ratios)) ** 0.5
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=4 * spread / len(ratios) ** 0.5)
    assert spread > 0.01


def test_columns_hold_all_that_is_looked_up(head: Callable) -> None:
    made = head()
    reading = made.read(TOKENS)
    object.__setattr__(reading, "top", reading.top[:, :3].contiguous())
    generator = torch.Generator().manual_seed(0)
    columns = Columns.of(reading, 60, 8, generator)
    wanted = {*TOKENS, *reading.top.flatten().tolist()}
    assert set(columns.ids.tolist()) == wanted
    assert not wanted & set(columns.others.tolist()) and 0 < len(columns.others) <= 8
    assert math.exp(columns.weight) * len(columns.others) == pytest.approx(60 - len(wanted))
    assert len(Columns.of(reading, 60, 0, generator).ids) == 60
