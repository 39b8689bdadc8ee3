"""The trainable draft computes what the engine's draft does, and sees what decoding would let it see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_dspark.training.measure import greedy_blocks, quality

TOKENS = [(7 * i + i * i) % 60 for i in range(30)]

KINDS = [
    {"markov": "vanilla"},
    {"markov": "gated", "layers": 3},
    {"markov": "rnn"},
    {"markov": "none"},
    {"markov": "none", "confidence": False, "layers": 1},
]


@pytest.mark.parametrize("shape", KINDS)
def test_blocks_are_the_engines(head: Callable, shape: dict) -> None:
    made = head(**shape)
    reading = made.read(TOKENS)
    anchors = torch.tensor([1, 6, 7, 19])
    # Features are kept in bfloat16; the engine gets the same.
    drafted, sure = greedy_blocks(made.model, made.lm_head, reading, anchors)
    for row, at in enumerate(anchors.tolist()):
        made.engine.reset()
        made.engine.observe(reading.features[:at].float(), 0)
        block = made.engine.draft(TOKENS[at], at)
        assert block.tokens == drafted[row].tolist()
        if block.confidence_logits:
            torch.testing.assert_close(torch.tensor(block.confidence_logits).sigmoid(), sure[row])
        else:
            assert sure[row].eq(1).all()


@pytest.mark.parametrize("shape", KINDS)
def test_teacher_forced_logits_are_the_engines(head: Callable, shape: dict) -> None:
    made = head(**shape)
    reading = made.read(TOKENS)
    anchors = torch.tensor([2, 11])
    hidden = made.model(reading.features.float(), reading.tokens, anchors, 4)
    latent, _ = made.model.latent(hidden, reading.tokens[anchors[:, None] + torch.arange(4)])
    logits = hidden @ made.lm_head.T
    if latent is not None:
        logits = logits + made.model.markov_head.markov_w2(latent)
    for row, at in enumerate(anchors.tolist()):
        made.engine.reset()
        made.engine.observe(reading.features[:at].float(), 0)
        block = made.engine.draft(TOKENS[at], at, lambda k, _, at=at: TOKENS[at + 1 + k])
        torch.testing.assert_close(logits[row], block.logits, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(hidden[row], block.hidden, atol=2e-5, rtol=1e-4)


def test_a_block_sees_the_context_before_its_anchor_and_nothing_else(head: Callable) -> None:
    made = head()
    reading = made.read(TOKENS)
    features = reading.features.float()
    anchors = torch.tensor([8, 15])

    def first(f: torch.Tensor, tokens: torch.Tensor, which: torch.Tensor = anchors) -> torch.Tensor:
        return made.model(f, tokens, which, 4)[0]

    before = first(features, reading.tokens)
    later = features.clone()
    later[8:] += 1  # the anchor's own features are not known when it is drafted from
    assert torch.equal(first(later, reading.tokens), before)
    earlier = features.clone()
    earlier[7] += 1
    assert not torch.allclose(first(earlier, reading.tokens), before)
    others = reading.tokens.clone()
    others[9:] = 1
    assert torch.equal(first(features, others), before)
    anchor = reading.tokens.clone()
    anchor[8] = (anchor[8] + 1) % 60
    assert not torch.allclose(first(features, anchor), before)
    # Another anchor in the same pass changes nothing.
    torch.testing.assert_close(first(features, reading.tokens, torch.tensor([8])), before)


def test_shorter_blocks_are_trained_as_blocks_of_their_own(head: Callable) -> None:
    made = head()
    reading = made.read(TOKENS)
    at = torch.tensor([8])
    assert made.model(reading.features.float(), reading.tokens, at, 2).shape == (1, 2, 32)


def test_quality_counts_what_decoding_would_accept(head: Callable) -> None:
    made = head()
    reading = made.read(TOKENS)
    reading.top[:, 0] = reading.tokens.roll(-1).int()  # a target that wants the text, so that something is accepted
    anchors = torch.arange(4, len(TOKENS) - 4)
    drafted, _ = greedy_blocks(made.model, made.lm_head, reading, anchors)
    reading.top[6, 0] = drafted[2, 0]  # accepted after anchor 6, but the text goes on differently
    reading.top[9, 0], reading.tokens[10] = drafted[5, 0], drafted[5, 0]
    total, tried, kept = 0, [0] * 4, [0] * 4
    drafted, _ = greedy_blocks(made.model, made.lm_head, reading, anchors)
    for row, at in enumerate(anchors.tolist()):
        total += 1
        for k in range(4):
            tried[k] += 1
            if drafted[row, k] != reading.top[at + k, 0]:
                break
            kept[k] += 1
            total += 1
            if drafted[row, k] != reading.tokens[at + k + 1]:
                break
    found = quality(made.model, made.lm_head, [(reading, 4)], anchors_each=1000)
    assert kept[0] >= 2
    assert found.anchors == len(anchors)
    assert found.accepted_length == pytest.approx(total / len(anchors))
    assert found.conditional == pytest.approx([k / max(1, t) for k, t in zip(kept, tried, strict=True)])
