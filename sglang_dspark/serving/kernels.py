"""What SGLang does in Triton around DSPARK, in torch. Signatures are those of the functions that they stand in for."""

from __future__ import annotations

import torch
from torch import Tensor


def assign_extend_cache_locs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: str,
) -> Tensor:
    """Cache rows [r · width] of `draft_token_num` positions a request from `start_offset` [r] on."""
    columns = start_offset.long()[:, None] + torch.arange(int(draft_token_num))
    return req_to_token[req_pool_indices.long()[:, None], columns].flatten().long()


def assign_token_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write the cache rows `out_cache_loc`, request after request, at positions start..end - 1 of each request."""
    counts = (end_offset - start_offset).long()
    rows = torch.repeat_interleave(req_pool_indices.long(), counts)
    ahead = counts.cumsum(0) - counts
    columns = torch.arange(rows.numel()) + torch.repeat_interleave(start_offset.long() - ahead, counts)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def last_slots(req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor) -> Tensor:
    """The cache row [r] of each request's last position, -1 where it has none."""
    last = (prefix_lens_tensor.long() - 1).clamp_min(0)
    rows = req_to_token[req_pool_indices_tensor.long(), last].to(prefix_lens_tensor.dtype)
    return torch.where(prefix_lens_tensor > 0, rows, -torch.ones_like(rows))


def softcap(full_logits: Tensor, final_logit_softcapping: float | None, output: Tensor | None = None) -> Tensor:
    """cap · tanh(logits / cap) of any shape, in place or into `output`; without a cap only copied."""
    target = full_logits if output is None else output.copy_(full_logits)
    if final_logit_softcapping is not None:
        target.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)
    return target


def accept_chain(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Rejection sampling along a chain, into `predicts`, `accept_index` and `accept_token_num`.

    Draft x_k is accepted with probability min(1, p(x_k) / q(x_k)); the first that is not is replaced by a sample of
    (p - q)+, and after the last one a token of p follows. `candidates` [r, γ + 1] begin with the anchor,
    `target_probs` are [r, γ + 1, V], `draft_probs` [r, γ, V]. Drafts that their own distribution gives nothing are
    rejected.
    """
    if block_verification:
        raise NotImplementedError("DSPARK on a CPU verifies token by token; leave out block verification.")
    drafts, every = candidates[:, 1:].long(), torch.arange(candidates.shape[0])
    count = drafts.shape[1]
    p = target_probs[:, :count].gather(2, drafts[:, :, None]).squeeze(2)
    q = draft_probs.gather(2, drafts[:, :, None]).squeeze(2)
    accepted = (q > 0) & (q <= 1) & (uniform_samples[:, :count] * q < p)
    kept = accepted.long().cumprod(1).sum(1)
    taken = torch.arange(count + 1) <= kept[:, None]
    accept_index[taken] = retrive_index[taken].to(accept_index.dtype)
    accept_token_num.copy_(kept)

    left = target_probs[every, kept].double()
    rejected = draft_probs[every, kept.clamp_max(count - 1)].double()
    rejected = torch.where((rejected >= 0) & (rejected <= 1), rejected, 0.0)
    left = (left - torch.where((kept < count)[:, None], rejected, 0.0)).clamp_min(0.0)
    mass = left.cumsum(1)
    aim = uniform_samples_for_final_sampling.double()[:, None] * mass[:, -1:]
    final = (mass <= aim).sum(1).clamp_max(left.shape[1] - 1)
    # Each row predicts the token after it: accepted drafts in their order, then the sampled one.
    following = torch.cat([drafts, drafts[:, :1]], 1).scatter(1, kept[:, None], final[:, None])
    predicts[retrive_index[taken].long()] = following[taken].to(predicts.dtype)
