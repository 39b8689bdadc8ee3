"""What models of published shapes cost on a device: steps by rows, drafts, bandwidth, overhead, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from local_runner.engines.base import Request
from local_runner.engines.torch.drafter import HeadDrafter
from local_runner.gpu_check.graphs import Capture, GraphedDraft
from local_runner.gpu_check.parts import Result
from local_runner.gpu_check.shapes import RandomPair, Shape, random_pair
from local_runner.measure import (
    Sample,
    bandwidth,
    draft_sample,
    fill,
    interleaved,
    read_samples,
    round_shares,
    step_sample,
    timed,
    waiting,
)
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

ROUNDING = 2.0**-6
"""How far two bfloat16 computations of one logit may part, relative to the greatest: a few units in the last place."""
ANCHORS = (3, 11, 29)
OVERHEAD_TOKENS = 48


def costs(
    result: Result,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    contexts: Sequence[int],
    rows: Sequence[int],
    repeats: int,
    capture: Capture | None,
    read_bytes: int,
) -> None:
    """Measure a random pair of `shape`. Times are seconds, medians of `repeats` with quartiles, all row counts in turn.

    Without `capture` nothing is measured as a graph. Acceptance is not claimed: the draft guesses.
    """
    checks: dict[str, bool] = result.setdefault("checks", {})
    cuda = device.type == "cuda"
    reads = read_samples(device, read_bytes)
    speed, way = bandwidth(interleaved(reads, repeats, warm_up=3), read_bytes)
    result["bandwidth"] = {"bytes_per_s": speed, "method": f"the quickest read of {read_bytes >> 20} MiB: {way}"}
    reads.clear()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    pair = random_pair(shape, device, dtype, max(contexts) + max(rows) + shape.block + OVERHEAD_TOKENS)
    result |= {
        "shape": shape.name,
        "dtype": str(dtype).removeprefix("torch."),
        "target_bytes_read": pair.target_parameters * dtype.itemsize,
        "draft_bytes_read": pair.draft_parameters * dtype.itemsize,
    }
    for context in contexts:
        at: Result = {}
        result[f"context {context}"] = at
        measure_context(at, checks, pair, context, rows, repeats, capture)
        one = at["step_s"]["1"]["median"]
        at["share_of_bandwidth"] = pair.target_parameters * dtype.itemsize / one / speed
    drafter = HeadDrafter(pair.draft, pair.target)
    prompt = tuple(1 + i % (shape.vocab - 1) for i in range(contexts[0]))
    request = Request(prompt, OVERHEAD_TOKENS, SamplingParams(), schedule=Fixed())
    round_shares(pair.target, drafter, [request])  # the first decoding is a warm-up
    shares = round_shares(pair.target, drafter, [request])
    result["shares"] = asdict(shares) | {"overhead_share": shares.overhead}
    if cuda:
        result["peak_memory_bytes"] = torch.cuda.max_memory_allocated()


def measure_context(
    at: Result,
    checks: dict[str, bool],
    pair: RandomPair,
    context: int,
    rows: Sequence[int],
    repeats: int,
    capture: Capture | None,
) -> None:
    """Steps of `rows` and drafts after `context` tokens, eager and, with `capture`, as graphs that must agree."""
    target, draft, device = pair.target, pair.draft, pair.target.device
    fill(target, context)
    samples: dict[str, Sample] = {f"rows {k}": step_sample(target, k) for k in rows}
    samples["draft"] = draft_sample(draft, context, device)
    eager = interleaved(samples, repeats, warm_up=3)
    at["step_s"] = {str(k): asdict(eager[f"rows {k}"]) for k in rows}
    at["draft_s"] = asdict(eager["draft"])
    if capture is None:
        return
    wait = waiting(device)
    steps = {f"rows {k}": _graphed_step(pair, k, context, capture) for k in rows}
    graphs: dict[str, Sample] = {name: timed(replay, wait) for name, (replay, _) in steps.items()}
    features = _features(pair, context)
    graphed = GraphedDraft(draft, features, capture)
    graphs["draft"] = timed(lambda: graphed.draft(ANCHORS[0]), wait)
    replayed = interleaved(graphs, repeats, warm_up=3)
    at["graphed_step_s"] = {str(k): asdict(replayed[f"rows {k}"]) for k in rows}
    at["graphed_draft_s"] = asdict(replayed["draft"])

    worst = max(apart for _, apart in steps.values())
    at["graphed_step_apart"] = worst
    checks[f"context {context}: graphed steps compute what eager ones do"] = worst <= ROUNDING
    draft.reset()
    draft.observe(features, 0)
    same = []
    for anchor in ANCHORS:
        block = draft.draft(anchor, context)
        tokens, logits = graphed.draft(anchor)
        # Random logits have near-ties, where one unit in the last place decides; the chain differs from there on.
        first = next((k for k, (a, b) in enumerate(zip(tokens, block.tokens, strict=True)) if a != b), len(tokens) - 1)
        same.append(apart(logits[: first + 1], block.logits[: first + 1]) <= ROUNDING)
        at.setdefault("graphed_drafts_equal", []).append(tokens == block.tokens)
    checks[f"context {context}: graphed drafts compute what eager ones do"] = all(same)


def apart(a: Tensor, b: Tensor) -> float:
    """The greatest difference between two tensors, relative to the greatest magnitude in `b`."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def _graphed_step(pair: RandomPair, rows: int, context: int, capture: Capture) -> tuple[Callable[[], None], float]:
    """A captured step, and how far its logits are from those of the eager step on other tokens than it captured."""
    target = pair.target
    tokens = torch.zeros(rows, dtype=torch.long, device=target.device)

    def run() -> tuple[Tensor, ...]:
        logits, features = target.model(tokens, context, target.taps, False)
        return (logits,) if features is None else (logits, features)

    captured = capture(run)
    other = [(5 + 3 * i) % target.vocab_size for i in range(rows)]
    tokens.copy_(torch.tensor(other))
    captured.replay()
    replayed = captured.outputs[0].clone()
    eager = target.forward(other)
    target.truncate(context)
    return captured.replay, apart(replayed, eager)


def _features(pair: RandomPair, context: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(context, pair.draft.config.feature_size, generator=generator)
    return features.to(pair.target.embedding)
