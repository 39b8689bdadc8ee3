"""The CPU backend's attention against a loop that says what it means, one row and one head at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sglang_dspark.serving import attention
from sglang_dspark.serving.attention import Kind, plan

HEADS, KV, SIZE, CACHE, LONGEST = 4, 2, 8, 400, 80


def naive(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, batch: list[tuple[int, int, int]], kind: Kind
) -> Tensor:
    """`batch` holds (row of the table, position of the first row, rows) of each request."""
    out, n = torch.zeros(q.shape[0], HEADS, SIZE), 0
    for request, start, width in batch:
        for p in range(start, start + width):
            seen = [
                j
                for j in range(start + width)
                if (not kind.causal or j <= p) and (kind.window is None or abs(p - j) <= kind.window)
            ]
            rows = table[request, seen].long()
            for h in range(HEADS):
                scores = torch.stack([(q[n, h] * keys[r, h * KV // HEADS]).sum() * kind.scale for r in rows])
                out[n, h] = (scores.softmax(0)[:, None] * values[rows, h * KV // HEADS]).sum(0)
            n += 1
    return out


def world(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, HEADS, SIZE, generator=generator)
    keys, values = (torch.randn(CACHE, KV, SIZE, generator=generator) for _ in range(2))
    table = torch.randperm(CACHE, generator=generator)[: 5 * LONGEST].view(5, LONGEST).int()
    return q, keys, values, table


BATCHES = {
    "one request": [(2, 11, 4)],
    "equal widths": [(0, 9, 4), (3, 11, 4), (1, 12, 4)],
    "ragged widths": [(4, 10, 1), (0, 13, 5), (2, 9, 3)],
    "no context": [(1, 0, 6), (0, 0, 6)],
    "decoding": [(0, 20, 1), (1, 24, 1), (4, 19, 1)],
    "unequal lengths": [(0, 70, 2), (1, 1, 2), (2, 3, 1)],
    "a long prompt": [(3, 20, attention.FOLD + 9)],
}
KINDS = {
    "causal": Kind(SIZE**-0.5, True),
    "whole block": Kind(1.0, False),
    "causal window": Kind(SIZE**-0.5, True, 3),
    "window both ways": Kind(0.7, False, 2),
}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_attention_is_the_naive_one(batch: list[tuple[int, int, int]], kind: Kind, together: bool) -> None:
    rows = sum(width for _, _, width in batch)
    q, keys, values, table = world(rows)
    requests, starts, widths = (torch.tensor(column) for column in zip(*batch, strict=True))
    got = plan(table, requests, starts, widths, together).attend(q, keys, values, kind)
    torch.testing.assert_close(got, naive(q, keys, values, table, batch, kind), rtol=1e-5, atol=1e-5)


def test_rows_after_the_last_request_are_zero() -> None:
    q, keys, values, table = world(7)
    planned = plan(table, torch.tensor([1, 2]), torch.tensor([5, 6]), torch.tensor([3, 2]))
    got = planned.attend(q, keys, values, KINDS["causal"])
    assert got.shape == q.shape
    assert not got[5:].any()
    assert got[:5].abs().sum(-1).all()


def test_unequal_lengths_are_computed_apart() -> None:
    table = world(1)[3]
    apart = plan(table, torch.tensor([0, 1, 2]), torch.tensor([75, 1, 1]), torch.tensor([2, 1, 1]))
    joined = plan(table, torch.tensor([0, 1]), torch.tensor([75, 70]), torch.tensor([2, 2]))
    assert (len(apart.rectangles), len(joined.rectangles)) == (3, 1)


def test_slots_of_another_numbering_are_used() -> None:
    q, keys, values, table = world(4)
    planned = plan(table, torch.tensor([0]), torch.tensor([6]), torch.tensor([4]))
    moved = torch.randperm(CACHE)
    shifted = [moved[r.slots] for r in planned.rectangles]
    there_keys, there_values = torch.empty_like(keys), torch.empty_like(values)
    there_keys[moved], there_values[moved] = keys, values
    kind = KINDS["causal window"]
    assert torch.equal(
        planned.attend(q, keys, values, kind), planned.attend(q, there_keys, there_values, kind, shifted)
    )


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_bfloat16_rows_over_a_float32_cache(kind: Kind) -> None:
    q, keys, values, table = world(6)
    batch = [(0, 9, 3), (1, 10, 3)]
    requests, starts, widths = (torch.tensor(column) for column in zip(*batch, strict=True))
    got = plan(table, requests, starts, widths).attend(q.bfloat16(), keys, values, kind)
    assert got.dtype == torch.bfloat16
    assert math.isclose(
        0.0, float((got.float() - naive(q, keys, values, table, batch, kind)).abs().max()), abs_tol=0.05
    )
