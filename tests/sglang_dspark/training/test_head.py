"""A head's configuration follows from its target, and its folder is read like any other's."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dspark.checkpoints.deepspec import read_config
from sglang_dspark.errors import InputError
from sglang_dspark.training.features import tap_layers
from sglang_dspark.training.head import Shape, begin_with, head_config, head_fields, mask_token


def test_export_keeps_every_bit(head: Callable, tmp_path: Path) -> None:
    made = head(markov="gated")
    read = read_config(tmp_path / "head")
    assert read == made.model.config and read.markov_head_type == "gated"
    assert {p.name for p in (tmp_path / "head").iterdir()} == {"config.json", "model.safetensors", "training.json"}


@pytest.mark.parametrize(
    ("layers", "taps"), [(30, (1, 8, 14, 20, 27)), (36, (1, 9, 17, 25, 33)), (4, (0, 1, 2)), (1, (0,))]
)
def test_taps_are_spread_and_spare_the_last_layer(layers: int, taps: tuple[int, ...]) -> None:
    assert tap_layers(layers) == taps


def test_shapes_that_cannot_be_are_refused(llama: Any) -> None:
    with pytest.raises(InputError, match="do not rise"):
        head_config(head_fields(llama.config, Shape(taps=(2, 1)), 0))
    with pytest.raises(InputError, match=r"-1\.\.3"):
        head_config(head_fields(llama.config, Shape(taps=(7,)), 0))


def test_the_mask_is_no_token_of_the_text() -> None:
    class Words:
        unk_token_id, pad_token_id, eos_token_id = None, 2, 2

        def __len__(self) -> int:
            return 50

    assert mask_token(Words(), 64) == 50
    assert mask_token(Words(), 50) == 0
    Words.pad_token_id = 7
    assert mask_token(Words(), 50) == 7
    assert mask_token(None, 50) == 0


def test_dflash_is_a_head_without_markov(head: Callable, tmp_path: Path) -> None:
    made = head(markov="none", confidence=False)
    said = json.loads((tmp_path / "head" / "config.json").read_text())
    assert said["markov_rank"] == 0 and made.model.markov_head is None and made.model.confidence_head is None
    assert not any(torch.isnan(p).any() for p in made.model.parameters())


def test_training_goes_on_from_another_head(head: Callable, tmp_path: Path) -> None:
    made = head()
    layers = made.model.config.num_target_layers
    other = copy.deepcopy(made.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    begin_with(other, tmp_path / "head", layers)
    stored = (p.bfloat16().float() for p in made.model.parameters())
    assert all(torch.equal(own, p) for own, p in zip(other.parameters(), stored, strict=True))
    other.config = replace(other.config, block=other.config.block + 1, mask_token_id=other.config.mask_token_id + 1)
    with pytest.raises(InputError, match="block, mask_token_id differ"):
        begin_with(other, tmp_path / "head", layers)
