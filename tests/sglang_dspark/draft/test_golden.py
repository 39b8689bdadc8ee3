"""Greedy decoding with a transformers target reproduces the reference's recorded runs round for round."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sglang_dspark.draft.load import TargetInfo, load_draft
from sglang_dspark.draft.model import DraftBlock, DraftModel

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[4] / "shared" / "golden"))
FOLDERS = ("qwen3-vanilla", "qwen3-gated", "qwen3-rnn", "qwen3-dflash", "gemma4-vanilla")
TOLERANCE = 1e-4

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden runs at {GOLDEN}; set DSPARK_GOLDEN")


class Target:
    """A transformers model that is run on the whole sequence each time, so that no cache of its own can err."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = self.model.config
        self.info = TargetInfo(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            embedding=self.model.get_input_embeddings().weight.detach(),
            lm_head=self.model.lm_head.weight.detach(),
            name=folder.name,
        )

    @torch.no_grad()
    def run(self, tokens: list[int], taps: tuple[int, ...]) -> tuple[list[int], Tensor]:
        """The argmax after each of `tokens`, and their features [n, m·d]."""
        out = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        assert max(taps) < self.info.num_layers - 1  # the last entry of hidden_states is normed: no layer's output
        return out.logits[0].argmax(-1).tolist(), torch.cat([out.hidden_states[k + 1][0] for k in taps], -1)


Observe = Callable[[DraftModel, Tensor, int], None]
"""Takes the features [n, ·] of all committed rows into a draft that may keep its first `kept` rows."""


def incremental(draft: DraftModel, features: Tensor, kept: int) -> None:
    draft.observe(features[kept:], kept)


def rebuilt(draft: DraftModel, features: Tensor, kept: int) -> None:
    draft.reset()
    draft.observe(features, 0)


def chunked(draft: DraftModel, features: Tensor, kept: int) -> None:
    for start in range(kept, len(features), 3):
        draft.observe(features[start : start + 3], start)


def overshooting(draft: DraftModel, features: Tensor, kept: int) -> None:
    """Observes rows that are then taken back, as after a rejection."""
    draft.observe(features[kept:], kept)
    draft.observe(features.flip(0)[:5], len(features))
    draft.crop(len(features))


def late(draft: DraftModel, features: Tensor, kept: int) -> None:
    """A fault: each row gets the features of the token before it."""
    draft.observe(torch.cat([features[:1], features[:-1]])[kept:], kept)


def decode(target: Target, draft: DraftModel, run: dict[str, Any], observe: Observe) -> list[tuple[Any, DraftBlock]]:
    """Decode a run; return (its round in the recorded form, the drafted block) for each round."""
    taps, prompt = draft.config.target_layer_ids, run["prompt"]
    draft.reset()
    predicted, features = target.run(prompt, taps)
    tokens: list[int] = [*prompt, predicted[-1]]
    rounds = []
    observe(draft, features, 0)
    # The recorded runs go on while the anchor stands before the end, so that the last round may lie wholly past it.
    while (start := len(tokens) - 1) < len(prompt) + run["max_new_tokens"]:
        block = draft.draft(tokens[-1], start)
        threshold = run["confidence_threshold"]
        below = [k for k, c in enumerate(block.confidence_logits) if 1 / (1 + math.exp(-c)) < threshold]
        scheduled = below[0] if below else len(block.tokens)
        predicted, features = target.run([*tokens, *block.tokens[:scheduled]], taps)
        accepted = 0
        while accepted < scheduled and predicted[start + accepted] == block.tokens[accepted]:
            accepted += 1
        following = predicted[start + accepted]
        record = {
            "start": start,
            "anchor": tokens[-1],
            "drafted_full": block.tokens,
            "scheduled": scheduled,
            "accepted": accepted,
            "next_token": following,
        }
        rounds.append((record, block))
        tokens += [*block.tokens[:accepted], following]
        observe(draft, features[: start + accepted + 1], start)
    assert tokens[len(prompt) :][: run["max_new_tokens"]] == run["output"]
    return rounds


def check(folder: Path, target: Target, draft: DraftModel, observe: Observe, runs: int) -> None:
    """Decode the first `runs` runs and assert that they are the recorded ones."""
    with np.load(folder / "golden.npz") as arrays:
        for number, run in enumerate(json.loads((folder / "golden.json").read_text())[:runs]):
            rounds = decode(target, draft, run, observe)
            assert len(rounds) == len(run["rounds"])
            for index, (expected, (record, block)) in enumerate(zip(run["rounds"], rounds, strict=True)):
                assert record == {key: expected[key] for key in record}, f"run {number}, round {index}"
                confidence = expected["confidence_logits"] or []
                np.testing.assert_allclose(block.confidence_logits, confidence, atol=TOLERANCE, rtol=0)
                if index < 3:
                    for kind, ours in (("draft_logits", block.logits), ("block_hidden", block.hidden)):
                        theirs = arrays[f"run{number}_{kind}_{index}"]
                        np.testing.assert_allclose(ours.numpy(), theirs, atol=TOLERANCE, rtol=0)


Pair = tuple[Path, Target, DraftModel]


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request: pytest.FixtureRequest) -> Pair:
    folder = GOLDEN / request.param
    target = Target(folder / "target")
    cpu = torch.device("cpu")
    draft = load_draft(folder / "draft", target.info, dtype=torch.float32, device=cpu, context_length=160)
    assert draft.backbone.embedding.data_ptr() == target.info.embedding.data_ptr()
    assert draft.backbone.lm_head.data_ptr() == target.info.lm_head.data_ptr()
    return folder, target, draft


@pytest.mark.parametrize(("observe", "runs"), [(incremental, 5), (rebuilt, 2), (chunked, 2), (overshooting, 2)])
def test_reproduces_every_round(pair: Pair, observe: Observe, runs: int) -> None:
    """The second run has a prompt of one token, the fourth and fifth a confidence threshold."""
    check(*pair, observe, runs)


def other_norm(draft: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not a factor: keys, and Gemma's values, are normed again and would hide one.
    buffers = draft.backbone.hidden_norm._buffers
    weight = draft.backbone.hidden_norm.weight
    monkeypatch.setitem(buffers, "weight", weight * torch.linspace(0.5, 1.5, len(weight)))


def causal_block(draft: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(positions: Tensor, span: int, window: int | None) -> Tensor:
        return torch.arange(span) <= positions[:, None]

    monkeypatch.setattr(draft.backbone, "_mask", mask)


def block_one_position_late(draft: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_offsets", draft._offsets + 1)


@pytest.mark.parametrize("fault", [other_norm, causal_block, block_one_position_late])
def test_a_faulty_model_is_noticed(
    pair: Pair, fault: Callable[[DraftModel, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(pair[2], monkeypatch)
    with pytest.raises(AssertionError):
        check(*pair, incremental, 1)


def test_features_of_the_wrong_token_are_noticed(pair: Pair) -> None:
    with pytest.raises(AssertionError):
        check(*pair, late, 1)
