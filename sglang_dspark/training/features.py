"""What training knows of the target: its features and its likeliest next tokens, for every position of a sequence."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TOP = 64
"""Next tokens that are kept of each distribution: the others are one lump, a few per cent of it at temperature 1."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A sequence as the target reads it.

    `features` [S, m·d] in bfloat16; `top` [S, TOP] the likeliest tokens after each position, best first, and `p`
    [S, TOP] their probabilities at temperature 1.
    """

    tokens: Tensor
    features: Tensor
    top: Tensor
    p: Tensor

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.features, self.top, self.p))


class TargetReader:
    """Runs a transformers causal LM over whole sequences; `taps` are layers k whose outputs are the features, -1 the
    embedding's.
    """

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        self.model, self.taps = model, tuple(taps)
        self.layers: list[Any] = list(model.get_decoder().layers)
        self.head: Any = model.get_output_embeddings()
        self.softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Reading:
        """One forward over `tokens` [S]."""
        device, me = self.head.weight.device, threading.get_ident()
        ids = torch.tensor(tokens, device=device)
        outputs: dict[int, Tensor] = {}

        def hook(tap: int) -> Any:
            def keep(module: Any, inputs: Any, output: Any) -> None:
                if threading.get_ident() == me:  # another thread may be reading another sequence
                    outputs[tap] = (output[0] if isinstance(output, tuple) else output)[0]

            return keep

        hooks = [self.layers[t].register_forward_hook(hook(t)) for t in self.taps if t >= 0]
        if -1 in self.taps:
            before = hook(-1)
            hooks.append(self.layers[0].register_forward_pre_hook(lambda _, inputs: before(_, inputs, inputs[0])))
        try:
            hidden = self.model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
        finally:
            for h in hooks:
                h.remove()
        features = torch.cat([outputs[t] for t in self.taps], -1)
        top, p = [], []
        for rows in hidden.split(64):  # logits of a whole sequence would be the largest tensor of all
            logits = self.head(rows).float()
            if self.softcap:
                logits = torch.tanh(logits / self.softcap) * self.softcap
            values, indices = logits.topk(min(TOP, logits.shape[1]), -1)
            top.append(indices.int())
            p.append((values - logits.logsumexp(-1, keepdim=True)).exp().half())
        return Reading(ids, features.bfloat16(), torch.cat(top), torch.cat(p))


class FeatureCache:
    """Readings by sequence, the first within `budget` bytes; the others are computed anew when they are asked."""

    def __init__(self, reader: TargetReader, budget: int) -> None:
        self.reader, self.budget = reader, budget
        self.used = 0
        self.misses = 0
        self._kept: dict[tuple[int, ...], Reading] = {}
        self._lock = threading.Lock()

    def get(self, tokens: tuple[int, ...]) -> Reading:
        """The reading of `tokens`."""
        if (kept := self._kept.get(tokens)) is not None:
            return kept
        reading = self.reader.read(tokens)
        with self._lock:
            self.misses += 1
            # Random order makes the oldest as likely to be asked next as any other: keep what is there.
            if tokens not in self._kept and self.used + reading.size <= self.budget:
                self._kept[tokens] = reading
                self.used += reading.size
        return reading


def tap_layers(layers: int, count: int = 5) -> tuple[int, ...]:
    """Layers spread over the depth as the published heads have them: from the second to the third last, or in shallow
    targets from the first to the second last. SGLang cannot capture the last one.
    """
    first, last = (1, layers - 3) if layers >= 8 else (0, max(layers - 2, 0))
    return tuple(sorted({round(first + (last - first) * i / max(1, count - 1)) for i in range(count)}))


def lump(values: Tensor) -> Tensor:
    """What is left of a distribution beside `values` [..., k]: [..., 1], never negative."""
    return F.relu(1 - values.sum(-1, keepdim=True))
