"""Which drafted tokens survive, and the token that follows them.

All rules are batched over requests: `drafted` is [R, k], of which the first `scheduled` [R] were verified; the target's
row i follows drafted[:i], so it has k+1 rows, and rows after the last scheduled one are never looked at. Each returns
`accepted` [R], how many drafts survive, and `next_token` [R], the correction or bonus after them. Tokens are int64.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from sglang_dspark.decoding.sampling import beside, sample


def accept_greedy(
    choices: torch.Tensor, drafted: torch.Tensor, scheduled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts while they equal the target's own `choices` [R, k+1]; the next token is the choice after them."""
    accepted = _prefix(choices[:, :-1] == drafted, scheduled)
    return accepted, _row(choices, accepted)


def accept_point_mass(
    p: torch.Tensor, drafted: torch.Tensor, scheduled: torch.Tensor, u_next: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts that were chosen and not drawn, such as greedy ones, while the target draws the same tokens.

    `p` [R, k+1, V] are the target's probabilities and `u_next` [R, k+1] the uniforms with which plain sampling would
    draw at these positions, so the output is plain sampling's, token for token. It is also the rule min(1, p/q) for a q
    with all mass on the draft: that accepts with probability p(draft), and its residual is p without the draft.
    """
    return accept_greedy(sample(p, u_next), drafted, scheduled)


def accept_sampled(
    p: torch.Tensor,
    q: torch.Tensor,
    drafted: torch.Tensor,
    scheduled: torch.Tensor,
    u_accept: torch.Tensor,
    u_next: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling: drafts were drawn from `q` [R, k, V], and the output follows `p` [R, k+1, V].

    Draft x is accepted with probability min(1, p(x)/q(x)), by `u_accept` [R, k]. The first rejection is replaced by a
    draw from (p-q)+ renormalised; if all survive, the bonus is drawn from p. Either draw uses its position's `u_next`
    [R, k+1]. `q` must be the very distribution that the drafts were drawn from, after all filters.
    """
    p_x, q_x = (d[:, : drafted.shape[1]].gather(-1, drafted.unsqueeze(-1)).squeeze(-1) for d in (p, q))
    accepted = _prefix(beside(u_accept, p) * q_x < p_x, scheduled)

    target, draft = _row(p, accepted), _row(pad(q, (0, 0, 0, 1)), accepted)
    rejected = (accepted < scheduled).unsqueeze(-1)
    residual = (target - draft * rejected).clamp(min=0)
    # Where p = q nothing is rejected but by rounding, and nothing is left of p - q.
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    return accepted, sample(weights, _row(beside(u_next, p), accepted))


def _prefix(kept: torch.Tensor, scheduled: torch.Tensor) -> torch.Tensor:
    """How many of the first `scheduled` [R] columns of `kept` [R, k] are true before the first that is not: [R]."""
    within = torch.arange(kept.shape[1], device=kept.device) < scheduled.unsqueeze(-1)
    return (kept & within).long().cumprod(-1).sum(-1)


def _row(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[r, index[r]] for each request r: [R, ...]."""
    return table[torch.arange(len(table), device=table.device), index]
