"""Torch counterparts of Triton kernels, against what they are for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_dspark.serving import kernels


def test_cache_rows_of_a_block() -> None:
    table = torch.arange(60).view(3, 20).int()
    rows = kernels.assign_extend_cache_locs(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=table,
        start_offset=torch.tensor([3, 7]),
        end_offset=torch.tensor([6, 10]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert rows.tolist() == [43, 44, 45, 7, 8, 9]
    assert rows.dtype == torch.int64


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=4))
@settings(deadline=None)
def test_token_slots_are_written_where_they_belong(spans: list[tuple[int, int]]) -> None:
    start, count = (torch.tensor(column) for column in zip(*spans, strict=True))
    table, requests = torch.zeros(5, 20, dtype=torch.int32), torch.tensor([4, 1, 3, 0])[: len(spans)]
    slots = torch.arange(100, 100 + int(count.sum()))
    kernels.assign_token_slots(requests, table, start, start + count, slots, len(spans))
    expected, taken = torch.zeros(5, 20, dtype=torch.int32), 0
    for request, (first, number) in zip(requests.tolist(), spans, strict=True):
        expected[request, first : first + number] = slots[taken : taken + number].int()
        taken += number
    assert torch.equal(table, expected)


def test_last_slots() -> None:
    table = torch.arange(40).view(2, 20).int()
    assert kernels.last_slots(table, torch.tensor([1, 0, 1]), torch.tensor([3, 0, 20])).tolist() == [22, -1, 39]


def test_softcap() -> None:
    logits = torch.tensor([[0.0, 3.0, -90.0]])
    capped = 30.0 * torch.tanh(logits / 30.0)
    apart = torch.empty(1, 3)
    assert torch.equal(kernels.softcap(logits, None, apart), logits)
    assert kernels.softcap(logits, 30.0, apart) is apart
    torch.testing.assert_close(apart, capped)
    assert logits[0, 2] == -90.0
    assert kernels.softcap(logits, 30.0) is logits
    torch.testing.assert_close(logits, capped)


def accept(candidates: Tensor, p: Tensor, q: Tensor, coins: Tensor, final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r, slots = candidates.shape
    predicts, index = torch.full((r * slots,), -7, dtype=torch.int32), torch.full((r, slots), -1, dtype=torch.int32)
    count, rows = torch.zeros(r, dtype=torch.int32), torch.arange(r * slots).view(r, slots)
    kernels.accept_chain(predicts, index, count, candidates, rows, rows, rows, coins, final, p, q, 1.0, 1.0, True)
    return predicts.view(r, slots), index, count


def test_chain_by_hand() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [0.2, 0.3, 0.5]]] * 3)
    q = torch.tensor([[[0.25, 0.75, 0.0], [0.1, 0.8, 0.1]]] * 3)
    candidates = torch.tensor([[9, 1, 1], [9, 1, 1], [9, 0, 1]])
    # Ratios p/q: token 1 first 2/3, then 1/4; token 0 first 2.
    coins = torch.tensor([[0.6, 0.2, 0.0], [0.7, 0.0, 0.0], [0.99, 0.3, 0.0]])
    predicts, index, count = accept(candidates, p, q, coins, torch.tensor([0.4, 0.5, 0.5]))
    assert count.tolist() == [2, 0, 1]
    assert predicts[0].tolist() == [1, 1, 1]  # all accepted, then 0.4 of (0.2, 0.3, 0.5)
    assert predicts[1].tolist() == [0, -7, -7]  # the residual of the first row has token 0 only
    assert predicts[2].tolist() == [0, 2, -7]  # that of the second token 2 only
    assert index.tolist() == [[0, 1, 2], [3, -1, -1], [6, 7, -1]]


@pytest.mark.parametrize("seed", range(3))
def test_first_two_tokens_have_the_targets_distribution(seed: int) -> None:
    """χ² of the joint of two tokens, from drafts of another distribution; 24 degrees of freedom, bound of 1 in 10⁴."""
    generator, n, v = torch.Generator().manual_seed(seed), 60_000, 5
    q1, p1 = (torch.rand(v, generator=generator).softmax(0) for _ in range(2))
    q2, p2, p3 = (torch.randn(v, v, generator=generator).softmax(1) for _ in range(3))
    first = torch.multinomial(q1, n, True, generator=generator)
    second = torch.multinomial(q2[first], 1, generator=generator).squeeze(1)
    candidates = torch.stack([torch.zeros_like(first), first, second], 1)
    p = torch.stack([p1.expand(n, v), p2[first], p3[second]], 1)
    q = torch.stack([q1.expand(n, v), q2[first]], 1)
    coins, final = torch.rand(n, 3, generator=generator), torch.rand(n, generator=generator)
    predicts, _, count = accept(candidates, p, q, coins, final)
    # Where the first draft was rejected, the second token would come from the next round: of the target's own.
    sampled = torch.multinomial(p2[predicts[:, 0].long()], 1, generator=generator).squeeze(1)
    two = torch.where(count > 0, predicts[:, 1].long(), sampled)
    seen = torch.bincount(predicts[:, 0].long() * v + two, minlength=v * v)
    expected = (p1[:, None] * p2).flatten() * n
    assert float(((seen - expected) ** 2 / expected).sum()) < 59.0
