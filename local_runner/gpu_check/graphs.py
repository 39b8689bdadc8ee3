"""Capturing work of fixed shape as a CUDA graph, so that replaying it costs one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from sglang_dspark.draft.heads import greedy
from sglang_dspark.draft.model import DraftModel

T = TypeVar("T")
WARM_UPS = 3
"""Runs before a capture, in which libraries pick kernels and allocate what they keep."""


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """`replay` does the captured work on what its inputs hold now, and its results are then in `outputs`."""

    replay: Callable[[], None]
    outputs: T


def capture(run: Callable[[], T]) -> Captured[T]:
    """Capture `run`, which must neither read anything back nor take inputs other than tensors that stay in place."""
    with torch.inference_mode():
        # Warm-ups run on a stream of their own, because capturing forbids work that the default stream waits for.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # PyTorch leaves its constructor untyped
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
    return Captured(graph.replay, outputs)


Capture = Callable[[Callable[[], tuple[Tensor, ...]]], Captured[tuple[Tensor, ...]]]


class GraphedDraft:
    """A draft's block after a fixed context as a graph: backbone, sequential head and confidence head, greedy."""

    def __init__(self, draft: DraftModel, features: Tensor, capture: Capture) -> None:
        """`features` [n, m·d] are those of the context, which is kept in a cache of its own."""
        with torch.inference_mode():
            context = draft.backbone.context(features, 0)
            cache = [(_with_room(keys, draft.block), _with_room(values, draft.block)) for keys, values in context]
        position, like = features.shape[0], draft.backbone.embedding
        tokens = torch.full((draft.block,), draft.config.mask_token_id, device=like.device)
        positions = torch.arange(position, position + draft.block, device=like.device)
        self._anchor = tokens[:1]

        def run() -> tuple[Tensor, ...]:
            hidden, logits = draft.backbone(tokens, positions, cache, position + draft.block)
            chosen, logits, confidence = draft.heads(tokens[:1], hidden, logits, greedy)
            return (chosen, logits) if confidence is None else (chosen, logits, confidence)

        self._captured = capture(run)

    def draft(self, anchor: int) -> tuple[list[int], Tensor]:
        """The block's tokens [γ], read back, and its logits [γ, V], which the next call overwrites."""
        self._anchor.fill_(anchor)
        self._captured.replay()
        tokens, logits = self._captured.outputs[:2]
        return tokens.tolist(), logits


def _with_room(rows: Tensor, block: int) -> Tensor:
    """Keys or values [n, heads, size] as a cache [heads, n + block, size]."""
    return torch.cat([rows, rows.new_zeros(block, *rows.shape[1:])]).transpose(0, 1).contiguous()
