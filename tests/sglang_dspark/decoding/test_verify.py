"""The acceptance rules at their edges; that they keep the distribution is in test_distribution.py."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.decoding.sampling import SamplingParams, probabilities, sample
from sglang_dspark.decoding.verify import accept_greedy, accept_point_mass, accept_sampled

V = 5


def distributions(*shape: int, seed: int) -> torch.Tensor:
    logits = torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed)) * 2
    return probabilities(logits, SamplingParams(temperature=1.0, top_k=3))


def uniform(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_greedy_accepts_the_prefix_that_the_target_chose() -> None:
    choices = torch.tensor([[1, 2, 3, 4]]).expand(6, 4)
    drafted = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 0]])
    scheduled = torch.tensor([3, 2, 0, 3, 3, 2])
    accepted, following = accept_greedy(choices, drafted, scheduled)
    assert accepted.tolist() == [3, 2, 0, 1, 0, 2]
    assert following.tolist() == [4, 3, 1, 2, 1, 3]


def test_equal_distributions_accept_everything() -> None:
    p = distributions(500, 3, seed=1)
    drafted, scheduled = p[:, :2].argmax(-1), torch.full((500,), 2)
    almost_one = torch.full((500, 3), 1 - 2**-53, dtype=torch.float64)
    accepted, following = accept_sampled(p, p[:, :2], drafted, scheduled, almost_one[:, :2], almost_one)
    assert (accepted == 2).all()
    assert (p[torch.arange(500), 2, following] > 0).all(), "the bonus is drawn from p"


def test_the_next_token_is_drawn_with_the_number_of_its_position() -> None:
    p, u_next = distributions(400, 3, seed=16), uniform(400, 3, seed=17)
    drafted, scheduled, r = p[:, :2].argmax(-1), torch.arange(400) % 3, torch.arange(400)
    accepted, following = accept_sampled(p, p[:, :2], drafted, scheduled, torch.zeros(400, 2), u_next)
    assert torch.equal(accepted, scheduled)
    assert torch.equal(following, sample(p[r, accepted], u_next[r, accepted]))


def test_a_rejection_never_returns_its_draft_nor_what_the_target_excludes() -> None:
    p, q = distributions(4000, 3, seed=2), distributions(4000, 2, seed=3)
    drafted, scheduled = q.argmax(-1), torch.full((4000,), 2)
    accepted, following = accept_sampled(p, q, drafted, scheduled, uniform(4000, 2, seed=4), uniform(4000, 3, seed=5))
    rejected = (accepted < 2).nonzero().squeeze(-1)
    assert 500 < len(rejected) < 4000
    assert (following != drafted.gather(1, accepted.clamp(max=1).unsqueeze(-1)).squeeze(-1))[rejected].all()
    assert (p[torch.arange(4000), accepted, following] > 0).all()


def test_where_rounding_leaves_no_residual_the_target_is_drawn_from() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0, 0.0, 0.0]] * 2])
    q = torch.tensor([[[0.5, 0.5, 1e-9, 0.0, 0.0]]])
    accepted, following = accept_sampled(
        p, q, torch.tensor([[2]]), torch.tensor([1]), torch.tensor([[0.5]]), torch.tensor([[0.7, 0.7]])
    )
    assert (accepted.item(), following.item()) == (0, 1)


def test_rows_that_were_not_scheduled_do_not_matter() -> None:
    p, q = distributions(300, 4, seed=6), distributions(300, 3, seed=7)
    drafted, scheduled = q.argmax(-1), torch.arange(300) % 4
    u, u_next = uniform(300, 3, seed=8), uniform(300, 4, seed=9)
    unscheduled = torch.arange(4) > scheduled.unsqueeze(-1)
    hidden = p.masked_fill(unscheduled.unsqueeze(-1), torch.nan)
    for got, want in zip(
        accept_sampled(hidden, q, drafted, scheduled, u, u_next),
        accept_sampled(p, q, drafted, scheduled, u, u_next),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_one_request_at_a_time_with_only_its_scheduled_rows_is_the_same() -> None:
    """As an engine calls it: rows and drafts are cut to what was verified, down to nothing."""
    p, q = distributions(80, 4, seed=10), distributions(80, 3, seed=11)
    drafted, scheduled = q.argmax(-1), torch.arange(80) % 4
    u, u_next = uniform(80, 3, seed=12), uniform(80, 4, seed=13)
    sampled = accept_sampled(p, q, drafted, scheduled, u, u_next)
    chosen = accept_point_mass(p, drafted, scheduled, u_next)
    for r in range(80):
        n = int(scheduled[r])
        one, rows, drafts = slice(r, r + 1), slice(n + 1), slice(n)
        again = accept_sampled(
            p[one, rows], q[one, drafts], drafted[one, drafts], scheduled[one], u[one, drafts], u_next[one, rows]
        )
        assert [t.item() for t in again] == [t[r].item() for t in sampled]
        again = accept_point_mass(p[one, rows], drafted[one, drafts], scheduled[one], u_next[one, rows])
        assert [t.item() for t in again] == [t[r].item() for t in chosen]


@pytest.mark.parametrize("fault", ["wrong token", "wrong row"])
def test_point_mass_rule_is_min_1_p_over_q(fault: str) -> None:
    """Its acceptance rate is p(draft), and that of another token or row is told apart from it."""
    n = 20_000
    p = distributions(1, 2, seed=14).expand(n, 2, V)
    token = int(p[0, 0].argmax())
    drafted, scheduled = torch.full((n, 1), token), torch.ones(n, dtype=torch.long)
    accepted, following = accept_point_mass(p, drafted, scheduled, uniform(n, 2, seed=15))
    rate, noise = accepted.double().mean().item(), 4 * 0.5 / n**0.5
    assert rate == pytest.approx(p[0, 0, token].item(), abs=noise)
    assert not (following[accepted == 0] == token).any()
    wrong = p[0, 0, (token + 1) % V] if fault == "wrong token" else p[0, 1, token]
    assert rate != pytest.approx(wrong.item(), abs=noise)
