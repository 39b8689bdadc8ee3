"""A llama.cpp target computes what transformers computes, shows its layers, and forgets exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from local_runner.engines.gguf import LlamaEngine
from local_runner.engines.gguf import target as module
from local_runner.engines.torch import TorchEngine

Make = Callable[..., Path]
Open = Callable[..., LlamaEngine]
Load = Callable[..., TorchEngine]
TEXT = [(11 * i + 3) % 96 for i in range(40)]
ARCHITECTURES = {"llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma3"}
TOLERANCE = 0.1
"""Keys and values are kept in half precision, and these models' logits and features are far apart."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_features_are_those_of_transformers(
    architecture: str, target: Make, draft: Make, family: Make, open_: Open, load: Load
) -> None:
    """Gemma 3 has windows of 6 tokens, and no taps of llama.cpp's own."""
    ours = open_(target(architecture), draft())
    theirs = load(family(ARCHITECTURES[architecture]), draft())
    for tokens in (TEXT[:1], TEXT[1:20], TEXT[20:]):
        torch.testing.assert_close(
            ours.target.forward(tokens), theirs.target.forward(tokens), atol=TOLERANCE, rtol=TOLERANCE
        )
        got, expected = (e.target.features(len(tokens) - 1 or 1) for e in (ours, theirs))
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_watching_the_graph_gives_the_taps_to_the_bit(
    target: Make, draft: Make, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tapped = open_(target(), draft()).target
    monkeypatch.setattr(module, "TAPPED", frozenset())
    watched = open_(target(), draft()).target
    for one in (tapped, watched):
        one.forward(TEXT)
    assert torch.equal(tapped.features(33), watched.features(33))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forgetting_is_exact(architecture: str, target: Make, open_: Open) -> None:
    """Whatever was appended and forgotten before, also beyond a window, a row is what it is after the same tokens."""
    engine = open_(target(architecture))
    one, choose = engine.target, random.Random(5)
    expected = one.forward(TEXT)
    one.reset()
    for _ in range(60):
        kept = choose.randrange(one.length + 1)
        one.truncate(kept)
        wrong = [choose.randrange(96) for _ in range(choose.randrange(1, 9))]
        one.forward(wrong)
        one.truncate(kept)
        right = TEXT[kept : kept + choose.randrange(1, 8)]
        if right:
            got = one.forward(right)
            torch.testing.assert_close(got, expected[kept : kept + len(right)], atol=TOLERANCE, rtol=TOLERANCE)
        assert one.tokens == TEXT[: one.length]  # type: ignore[attr-defined]


def test_forgetting_goes_back_beyond_what_a_window_holds(target: Make, open_: Open) -> None:
    """A cache that keeps no more than the window says that it forgot, and has lost what came before."""
    one = open_(target("gemma3", max_position_embeddings=2048)).target
    long = [(7 * i + i // 11) % 96 for i in range(1000)]
    for start in range(0, 1000, 250):
        one.forward(long[start : start + 250], last_only=True)
    one.truncate(250)
    got = one.forward(long[250:270])
    one.reset()
    one.forward(long[:250], last_only=True)
    torch.testing.assert_close(got, one.forward(long[250:270]), atol=TOLERANCE, rtol=TOLERANCE)


def test_only_the_last_row_where_only_it_is_wanted(target: Make, open_: Open) -> None:
    one = open_(target()).target
    every = one.forward(TEXT)
    one.reset()
    last = one.forward(TEXT, last_only=True)
    assert last.shape == (1, 96)
    torch.testing.assert_close(last, every[-1:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("tokens", "says"), [([1] * 129, "do not fit in 128"), ([], "0 tokens after 0")])
def test_what_would_end_the_process_is_an_error(tokens: Any, says: str, target: Make, open_: Open) -> None:
    one = open_(target()).target
    with pytest.raises(ValueError, match=says):
        one.forward(tokens)
    with pytest.raises(ValueError, match="rows of logits"):
        one.forward([1] * (module.OUTPUTS + 1))
    assert one.forward([1]).shape == (1, 96)
