"""Which tokens may be sampled, and which one a seed stands for. In torch, for any device."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def restrict(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [n, V], already divided by their temperatures, with -inf for tokens that may not be sampled.

    All three limits [n] are applied to the same distribution, as SGLang's sampler in PyTorch does: the k likeliest,
    those before which less than or exactly top-p has been summed up, and those that have min-p of the likeliest's
    probability.
    """
    p, order = logits.softmax(-1).sort(dim=-1, descending=True)
    ranks = torch.arange(p.shape[1], device=p.device)
    kept = (ranks < top_k[:, None]) & (p.cumsum(-1) - p <= top_p[:, None]) & (p >= p[:, :1] * min_p[:, None])
    kept = torch.zeros_like(kept).scatter(1, order, kept)
    return logits.masked_fill(~kept, -torch.inf)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) by which the token at `position` of a request with `seed` is sampled, whatever is with it
    in a batch and however it was drafted.
    """
    return random.Random(f"{seed} {position}").random()


def pick(logits: Tensor, aims: Tensor) -> Tensor:
    """The tokens [n] at the quantiles `aims` [n] of the distributions of logits [n, V], in the order of ids."""
    mass = logits.double().softmax(-1).cumsum(-1)
    found = (mass <= aims.to(mass.device)[:, None] * mass[:, -1:]).sum(-1)
    # Rounding may leave the last tokens, which have no probability, to be found.
    return torch.minimum(found, (mass < mass[:, -1:]).sum(-1))


def certain(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logits shaped as `logits` [n, V] that leave `tokens` [n] only."""
    return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)
