"""Batched decoding gives each sequence what it would get alone, however slots are refilled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_dspark.errors import InputError
from sglang_dspark.native.build import find_compiler
from sglang_dspark.training.batched import BatchedDecoder, OneByOneDecoder, decoder

PROMPTS = ([3, 9, 27], [1], [40, 2, 8, 50, 31, 7, 7, 12, 19, 5, 5, 5, 1, 2, 3, 4, 9, 9])


def alone(target: Any, tokens: list[int]) -> torch.Tensor:
    out: torch.Tensor = target(torch.tensor([tokens])).logits[0, -1]
    return out


def kinds(target: Any, slots: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "padded": BatchedDecoder(target, slots, 64, compiled=False),
        "one by one": OneByOneDecoder(target, slots, 64),
    }
    if find_compiler():
        made["compiled"] = BatchedDecoder(target, slots, 64)
        assert made["compiled"]._library is not None
    return made


@pytest.mark.parametrize("kind", ["padded", "compiled", "one by one"])
def test_every_slot_has_its_own_length(target: Any, kind: str) -> None:
    made = kinds(target, 3).get(kind)
    if made is None:
        pytest.skip("there is no C++ compiler; install one (Debian: apt install g++)")
    texts = [list(p) for p in PROMPTS]
    for slot in range(3):
        made.restart(slot, ())
    for at in range(30):
        logits = made.step(torch.tensor([t[at] for t in texts]))
        for slot, text in enumerate(texts):
            # Caches are in bfloat16.
            torch.testing.assert_close(logits[slot], alone(target, text[: at + 1]), atol=0.15, rtol=0.1)
            if len(text) == at + 1:
                text.append(int(logits[slot].argmax()))


@pytest.mark.parametrize("kind", ["padded", "compiled", "one by one"])
def test_a_slot_begins_anew_behind_the_prefix(target: Any, kind: str) -> None:
    made = kinds(target, 2).get(kind)
    if made is None:
        pytest.skip("there is no C++ compiler; install one (Debian: apt install g++)")
    prefix = tuple(PROMPTS[2])
    for slot in range(2):
        made.restart(slot, prefix)
    first = made.step(torch.tensor([11, 12]))
    for token in (1, 2, 3):
        made.step(torch.tensor([token, token]))
    made.restart(1, prefix)
    again = made.step(torch.tensor([4, 12]))
    torch.testing.assert_close(again[1], first[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again[0], alone(target, [*prefix, 11, 1, 2, 3, 4]), atol=0.15, rtol=0.1)


def test_compiled_and_padded_attention_agree(target: Any) -> None:
    if not find_compiler():
        pytest.skip("there is no C++ compiler; install one (Debian: apt install g++)")
    made = kinds(target, 2)
    for at in range(40):  # past two tiles of positions
        tokens = torch.tensor([at % 60, (3 * at) % 60])
        a, b = made["compiled"].step(tokens), made["padded"].step(tokens)
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
        if at == 20:
            for each in made.values():
                each.restart(1, ())


def test_quantised_products_are_near(target: Any) -> None:
    exact, near = BatchedDecoder(target, 2, 64), BatchedDecoder(target, 2, 64, quantised=True)
    for at in range(12):
        a, b = exact.step(torch.tensor([at, 5])), near.step(torch.tensor([at, 5]))
        distance = (a.softmax(-1) - b.softmax(-1)).abs().sum(-1) / 2
        assert 0 < distance.max() < 0.3


def test_other_forms_go_one_by_one_and_long_ones_are_refused(target: Any) -> None:
    assert isinstance(decoder(target, 2, 64, quantised=False), BatchedDecoder)
    with pytest.raises(InputError, match="96 positions"):
        BatchedDecoder(target, 2, 97)
    target.config.model_type, before = "mistral", target.config.model_type
    try:
        assert isinstance(decoder(target, 8, 64, quantised=False), OneByOneDecoder)
        with pytest.raises(InputError, match="mistral"):
            BatchedDecoder(target, 2, 64)
    finally:
        target.config.model_type = before
