"""What may be sampled, and by which numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from sglang_dspark.serving.choice import certain, pick, restrict, uniform


@settings(deadline=None)
@given(
    some.integers(0, 2**31),
    some.integers(1, 12),
    some.sampled_from([0.05, 0.4, 0.8, 1.0]),
    some.sampled_from([0, 0.1, 1]),
)
def test_limits_are_those_of_the_definition(seed: int, k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 2
    p = logits[0].softmax(0).tolist()
    order = sorted(range(12), key=lambda i: -p[i])
    kept = {
        t
        for rank, t in enumerate(order)
        if rank < k and sum(p[o] for o in order[:rank]) <= top_p + 1e-7 and p[t] >= min_p * p[order[0]]
    }
    found = restrict(logits, torch.tensor([k]), torch.tensor([top_p]), torch.tensor([float(min_p)]))[0]
    assert set(found.isfinite().nonzero().flatten().tolist()) == kept
    assert found[found.isfinite()].tolist() == logits[0][found.isfinite()].tolist()


def test_a_uniform_number_picks_by_probability() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0]])
    p, count = logits.softmax(-1)[0], 20000
    tokens = pick(logits.expand(count, -1), torch.tensor([uniform(3, n) for n in range(count)], dtype=torch.float64))
    seen = torch.bincount(tokens, minlength=4)
    assert seen[1] == 0
    assert float(((seen - p * count) ** 2 / (p * count))[[0, 2, 3]].sum()) < 18.4  # χ², 2 degrees, one in 10⁴


@pytest.mark.parametrize("aim", [0.0, 1 - 2**-53, 1.0])
def test_the_ends_are_tokens_that_may_be_sampled(aim: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.3, -torch.inf]])
    assert pick(logits, torch.tensor([aim], dtype=torch.float64)).item() in (1, 2)


def test_numbers_differ_by_seed_and_position() -> None:
    assert len({uniform(seed, position) for seed in range(30) for position in range(30)}) == 900
    assert uniform(1, 23) != uniform(12, 3)
    assert uniform(-(2**63), 5) == uniform(-(2**63), 5)


def test_a_certain_token_is_the_only_one() -> None:
    left = certain(torch.randn(2, 5), torch.tensor([4, 0])).softmax(-1)
    assert left.tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
