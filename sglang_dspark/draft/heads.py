"""The sequential head, p_k ∝ exp(U_k + B_k), and the confidence head, c_k = σ(w·[h_k ; W1[x_{k-1}]]) (DSpark, §3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.linear import Linear

Pick = Callable[[int, Tensor], Tensor]
"""Chooses token k, as a tensor [1], from its logits [1, V]."""


def greedy(_: int, logits: Tensor) -> Tensor:
    """The argmax [1] of logits [1, V], left on its device. `max` is several times quicker than `argmax` in bfloat16."""
    return logits.max(-1).indices


class MarkovHead(nn.Module):
    """Vanilla: B_k = W1[x_{k-1}] W2."""

    w1: Tensor

    def __init__(self, config: DraftConfig, take: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.register_buffer("w1", take("markov_head.markov_w1.weight"))
        self.w2 = Linear(take("markov_head.markov_w2.weight"))

    def latent(self, state: Tensor, z: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The next state and the latent that W2 turns into the bias, all [1, r], from z = W1[x_{k-1}] and h_k."""
        return state, z


class GatedHead(MarkovHead):
    """Gated: W1[x] is multiplied by σ(gate_proj [h_k ; W1[x]]) before W2."""

    def __init__(self, config: DraftConfig, take: Callable[[str], Tensor]) -> None:
        super().__init__(config, take)
        self.gate = linear(take, "markov_head.gate_proj")

    def latent(self, state: Tensor, z: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `MarkovHead.latent`."""
        return state, torch.sigmoid(self.gate(torch.cat([hidden, z], -1))) * z


class RnnHead(MarkovHead):
    """RNN: (g, c, o) = joint_proj [s ; W1[x] ; h_k], s' = σ(g)·s + (1 - σ(g))·tanh(c), B = W2 tanh(o), s_0 = 0."""

    def __init__(self, config: DraftConfig, take: Callable[[str], Tensor]) -> None:
        super().__init__(config, take)
        self.joint = linear(take, "markov_head.joint_proj")

    def latent(self, state: Tensor, z: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `MarkovHead.latent`."""
        gate, candidate, output = self.joint(torch.cat([state, z, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return gate * state + (1.0 - gate) * torch.tanh(candidate), torch.tanh(output)


HEADS = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RnnHead}


class Heads(nn.Module):
    """Both heads of a draft: chooses the block's tokens from left to right and judges their survival."""

    def __init__(self, config: DraftConfig, take: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.markov = HEADS[config.markov_head_type](config, take) if config.markov_rank else None
        self.confidence = linear(take, "confidence_head.proj") if config.confidence else None

    def forward(
        self, anchor: Tensor, hidden: Tensor, logits: Tensor, pick: Pick = greedy
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [γ], logits after the sequential head [γ, V], and confidence logits [γ] in float32 where there is a
        head.

        `anchor` [1] is the last committed token, `hidden` [γ, d] the backbone's states, `logits` [γ, V] its logits.
        """
        steps = range(logits.shape[0])
        if self.markov is None:
            tokens = torch.cat([pick(k, logits[k : k + 1]) for k in steps])
            return tokens, logits, self._judge(hidden)
        previous, chosen, rows, features = anchor, [], [], []
        state = hidden.new_zeros(1, self.markov.w1.shape[1])
        for k in steps:
            z = F.embedding(previous, self.markov.w1)
            state, latent = self.markov.latent(state, z, hidden[k : k + 1])
            row = logits[k : k + 1] + self.markov.w2(latent)
            previous = pick(k, row)
            chosen.append(previous)
            rows.append(row)
            features.append(z)
        judged = torch.cat([hidden, torch.cat(features)], -1) if self.with_markov else hidden
        return torch.cat(chosen), torch.cat(rows), self._judge(judged)

    def _judge(self, features: Tensor) -> Tensor | None:
        return None if self.confidence is None else self.confidence(features).float().squeeze(-1)


def linear(take: Callable[[str], Tensor], name: str) -> nn.Linear:
    """A frozen linear layer of the tensors `name`.weight and `name`.bias."""
    weight, bias = take(f"{name}.weight"), take(f"{name}.bias")
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    return layer
