"""What a request asks for, honoured where SGLang's verification ignores it, and refused by name where it cannot be.

Every row of a block is given the logits that decoding one by one would have had there: penalties count the drafted
tokens before it. Top-k, top-p and min-p limit the distribution that drafts are accepted against. A seed decides the
token of each position, and a draft is accepted if it is that token. None of this costs a batch anything in which no
request asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sglang_dspark.serving.choice import certain, pick, restrict, uniform
from sglang_dspark.serving.penalties import Penalties

_answered: WeakKeyDictionary[Any, Penalties] = WeakKeyDictionary()
"""By request of SGLang's, what its penalties have counted so far."""

REFUSED = {
    "custom_logit_processor": "a processor would not see the drafted tokens before each position",
    "return_hidden_states": "hidden states are used up by the draft",
    "watermark": "a watermark would not be in drafted tokens",
}
"""Parameters of a request that cannot be honoured, each with why."""


def refuse(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before SGLang validates a request: raise ValueError, which becomes HTTP 400, for what cannot be honoured."""
    sampling = request.sampling_params or {}
    for name, why in REFUSED.items():
        if getattr(request, name, None) or sampling.get(name):
            raise ValueError(f"{name} cannot be honoured with DSPARK: {why}. Leave it out, or ask a plain server.")
    if (sampling.get("custom_params") or {}).get("dspark") is False:
        raise ValueError(
            "custom_params.dspark=false cannot be honoured: this server drafts for every request. Start a plain server"
            " beside it and ask that one."
        )


def step(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around one step of the worker, prefill or decoding: look what the requests of the batch ask for."""
    info = batch.sampling_info
    if info is not None and batch.reqs:
        info.dspark_care = any(_penalised(r) or _limited(r) or _seed(r) is not None for r in batch.reqs)
        if batch.forward_mode.is_extend():
            for request in filter(_penalised, batch.reqs):
                _answered[request] = _penalties(request, request.output_ids, info)
            # Positions are those of the tokens that are chosen.
            info.dspark_aims = {
                row: uniform(seed, len(r.origin_input_ids) + len(r.output_ids))
                for row, r in enumerate(batch.reqs)
                if (seed := _seed(r)) is not None
            }
    return original(worker, batch, *args, **kwargs)


def first_token(
    original: Callable[..., Tensor],
    sampler: Any,
    logits_output: Any,
    info: Any,
    return_logprob: bool,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Around the sampler that chooses the token after a prompt: seeded requests are left one choice."""
    aims: dict[int, float] = getattr(info, "dspark_aims", {})
    if aims:
        logits, rows = logits_output.next_token_logits, list(aims)
        if return_logprob and kwargs.get("logprob_logits") is None:
            kwargs["logprob_logits"] = logits.clone()
        allowed = _restricted(logits[rows], info, torch.tensor(rows, device=logits.device))
        logits[rows] = certain(allowed, pick(allowed, torch.tensor(list(aims.values()), dtype=torch.float64)))
    return original(sampler, logits_output, info, return_logprob, *args, **kwargs)


def adjusted(original: Callable[..., Any], executor: Any, **kwargs: Any) -> Any:
    """Around the target's pass over the blocks: their logits leave it with penalties counted along each block.

    SGLang's own adjustment is told of neither penalties, whose counts it does not keep here, nor the logit bias, which
    comes after them.
    """
    batch, info = kwargs["batch"], kwargs["sampling_info"]
    executor.dspark_batch = batch
    rows = [] if info is None else [row for row, request in enumerate(batch.reqs) if _penalised(request)]
    if not rows:
        return original(executor, **kwargs)
    bare = replace(
        info, penalizer_orchestrator=None, acc_additive_penalties=None, acc_scaling_penalties=None, logit_bias=None
    )
    result = original(executor, **{**kwargs, "sampling_info": bare})
    verified = result[0] if isinstance(result, tuple) else result
    blocks = kwargs.get("verify_ids_2d")
    if blocks is None:
        blocks = torch.cat([kwargs["draft_block_ids"][:, :1], kwargs["draft_tokens"]], dim=1)
    logits = verified.logits_output.next_token_logits.view(*blocks.shape, -1)
    for row in rows:
        request = batch.reqs[row]
        if request not in _answered:
            # Its prompt was read by another server: the one token that came from there is the anchor.
            _answered[request] = _penalties(request, request.output_ids[:-1], info)
        _answered[request].adjust(logits[row], blocks[row])
    if info.logit_bias is not None:
        logits += info.logit_bias[:, None]
    return result


def accepted(original: Callable[..., Any], executor: Any, **kwargs: Any) -> Any:
    """Around acceptance: against limited distributions, and seeds; then what was committed is counted."""
    batch = executor.dspark_batch
    info, logits, blocks = kwargs["sampling_info"], kwargs["target_logits"], kwargs["verify_ids_2d"]
    if info is not None and not info.is_all_greedy and any(_limited(r) or _seed(r) is not None for r in batch.reqs):
        kwargs["target_logits"] = _chosen(logits, info, batch.reqs, kwargs["prefix_lens"], blocks.shape[1])
        kwargs["sampling_info"] = replace(
            info,
            temperatures=torch.ones_like(info.temperatures),
            need_top_k_sampling=False,
            need_top_p_sampling=False,
            need_min_p_sampling=False,
        )
    accept = original(executor, **kwargs)
    for row, request in enumerate(batch.reqs):
        if request in _answered:
            _answered[request].commit(blocks[row], accept.commit_lens[row])
    return accept


def needs_no_care(original: Callable[[Any], bool], info: Any) -> bool:
    """Around the question whether logits are used as they are, on which captured graphs accept by themselves."""
    return not getattr(info, "dspark_care", False) and original(info)


def finish(original: Callable[..., None], request: Any, new: int = 1) -> None:
    """Around the question whether a request is finished by its `new` last tokens: asked token by token where strings
    or patterns may end it, because SGLang looks for these in all of a round before it looks for stop tokens in any.
    """
    sampling, whole = request.sampling_params, request.output_ids
    if new <= 1 or not (sampling.stop_strs or sampling.stop_regex_strs):
        original(request, new)
        return
    try:
        for length in range(len(whole) - new + 1, len(whole) + 1):
            request.output_ids = whole[:length]
            original(request, 1)
            if request.finished():
                request.finished_len = length if request.finished_len is None else request.finished_len
                break
    finally:
        request.output_ids = whole


def _chosen(logits: Tensor, info: Any, requests: Sequence[Any], prefix: Tensor, width: int) -> Tensor:
    """Logits [r · width, V] divided by temperatures, of what may be sampled; of one token each for seeded requests."""
    rows = torch.arange(len(requests), device=logits.device).repeat_interleave(width)
    allowed = _restricted(logits, info, rows)
    seeds = {row: seed for row, request in enumerate(requests) if (seed := _seed(request)) is not None}
    if seeds:
        anchors = prefix.tolist()
        for row, seed in seeds.items():
            own = allowed[row * width : (row + 1) * width]
            aims = [uniform(seed, anchors[row] + 1 + k) for k in range(width)]
            own.copy_(certain(own, pick(own, torch.tensor(aims, dtype=torch.float64))))
    return allowed


def _restricted(logits: Tensor, info: Any, rows: Tensor) -> Tensor:
    """Logits [n, V] as the sampler may use them, of requests `rows` [n] of the batch. Greedy ones stay as they are."""
    scaled = logits / info.temperatures.view(-1)[rows][:, None]
    top_k = info.top_ks[rows]
    return torch.where(top_k[:, None] <= 1, scaled, restrict(scaled, top_k, info.top_ps[rows], info.min_ps[rows]))


def _penalised(request: Any) -> bool:
    p = request.sampling_params
    return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or p.min_new_tokens)


def _limited(request: Any) -> bool:
    """Whether it samples within limits that SGLang's acceptance does not have: min-p, or top-k and top-p at once."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    p = request.sampling_params
    return bool(p.top_k > 1 and (p.min_p > 0 or (p.top_k != TOP_K_ALL and p.top_p < 1)))


def _seed(request: Any) -> int | None:
    """The seed of a request that samples."""
    p = request.sampling_params
    seed: int | None = p.sampling_seed
    return seed if p.top_k > 1 else None


def _penalties(request: Any, answered: Sequence[int], info: Any) -> Penalties:
    p, tokenizer = request.sampling_params, request.tokenizer
    stops = {*(p.stop_token_ids or ()), *(request.eos_token_ids or ())}
    if tokenizer is not None:
        stops |= {*(getattr(tokenizer, "additional_stop_token_ids", None) or ()), tokenizer.eos_token_id}
    return Penalties.of(
        answered,
        info.vocab_size,
        info.temperatures.device,
        frequency=p.frequency_penalty,
        presence=p.presence_penalty,
        repetition=p.repetition_penalty,
        minimum=p.min_new_tokens,
        stops=stops - {None},
    )
