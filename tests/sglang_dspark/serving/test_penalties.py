"""Penalties along a block, against one token after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dspark.serving.penalties import Penalties

V, BLOCK = 23, [4, 4, 9, 1, 4]


def one_by_one(
    logits: Tensor, answered: list[int], f: float, p: float, r: float, least: int, stops: list[int]
) -> Tensor:
    """The definition: a row at a time, a token at a time."""
    out = logits.clone()
    for token in range(V):
        count = answered.count(token)
        if count:
            out[token] -= f * count + p
            out[token] = out[token] / r if out[token] > 0 else out[token] * r
    if len(answered) < least:
        out[stops] = -torch.inf
    return out


@pytest.mark.parametrize(
    "f, p, r, least", [(1.5, 0, 1, 0), (0, -0.7, 1, 0), (0, 0, 1.8, 0), (0.3, 0.2, 0.5, 0), (0, 0, 1, 6)]
)
@pytest.mark.parametrize("before", [[], [9, 2, 9]])
def test_rows_are_what_decoding_one_by_one_has(f: float, p: float, r: float, least: int, before: list[int]) -> None:
    logits = torch.randn(len(BLOCK), V, generator=torch.Generator().manual_seed(1)) * 3
    penalties = Penalties.of(
        before, V, torch.device("cpu"), frequency=f, presence=p, repetition=r, minimum=least, stops=[2, 5]
    )
    wanted = [one_by_one(row, [*before, *BLOCK[: k + 1]], f, p, r, least, [2, 5]) for k, row in enumerate(logits)]
    penalties.adjust(logits, torch.tensor(BLOCK))
    torch.testing.assert_close(logits, torch.stack(wanted))


def test_only_what_was_committed_counts_in_the_next_block() -> None:
    penalties = Penalties.of([7], V, torch.device("cpu"), frequency=1.0)
    penalties.commit(torch.tensor(BLOCK), torch.tensor(3))
    assert penalties.counts.tolist() == Penalties.of([7, *BLOCK[:3]], V, torch.device("cpu")).counts.tolist()
