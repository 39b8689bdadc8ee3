"""Muon takes PyTorch's steps, in float32."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.training.muon import Muon, orthogonal

SHAPES = [(64, 32), (32, 96), (32, 32)]


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_pytorch(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine = Muon([ours], lr=0.01, weight_decay=0.1)
    others = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="original")
    for size in (1.0, 1e-4, 30.0, 2.0):
        gradient = torch.randn(shape, generator=generator) * size
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        others.step()
    # A step's spectral norm is 0.01; theirs is rounded to bfloat16.
    moved = (ours - start).norm()
    assert moved > 0.01 and (ours - theirs).norm() < 0.02 * moved


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_to_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1))))
    assert values.min() > 0.5 and values.max() < 1.25
