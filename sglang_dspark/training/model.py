"""The draft as a trainable module: many anchors of one sequence in one pass, each with a block of its own.

The same arithmetic as `sglang_dspark.draft` (a test compares them), written for gradients: where the engine keeps keys
of the context in a cache, training sees a whole sequence, and a mask gives every anchor the context it would have had.
Parameters carry DeepSpec's names, so a state dict is a checkpoint.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_dspark.draft.config import Attention, DraftConfig
from sglang_dspark.draft.rope import rope_table, rotate


class Norm(nn.Module):
    """RMSNorm with a weight that starts at one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def product(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A linear layer that starts with the usual small random weights."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class SelfAttention(nn.Module):
    """Queries of the blocks over the context before their anchor and over their own block, both ways."""

    def __init__(self, config: DraftConfig, shape: Attention) -> None:
        super().__init__()
        self.shape, d = shape, config.hidden_size
        self.q_proj = product(d, shape.heads * shape.head_dim)
        self.k_proj = product(d, shape.kv_heads * shape.head_dim)
        self.v_proj = product(d, shape.kv_heads * shape.head_dim)
        self.o_proj = product(shape.heads * shape.head_dim, d)
        self.q_norm, self.k_norm = Norm(shape.head_dim, config.eps), Norm(shape.head_dim, config.eps)

    def forward(self, x: Tensor, context: Tensor, rope: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Blocks x [N, γ, d] at `positions` [N, γ], context [S, d]; `seen` [N, S] says which rows an anchor has."""
        (blocks, rows, _), span = x.shape, context.shape[0]
        heads, kv, size = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        cos, sin = (part[positions].unsqueeze(2) for part in rope)
        q = rotate(self.q_norm(self.q_proj(x).view(blocks, rows, heads, size)), cos, sin)
        own_k = rotate(self.k_norm(self.k_proj(x).view(blocks, rows, kv, size)), cos, sin)
        own_v = self.v_proj(x).view(blocks, rows, kv, size)
        cos, sin = (part[:span].unsqueeze(1) for part in rope)
        k = rotate(self.k_norm(self.k_proj(context).view(span, kv, size)), cos, sin)
        v = self.v_proj(context).view(span, kv, size)
        # [kv, N, group·γ, size]: query heads that share a key head are rows of one head.
        q = q.view(blocks, rows, kv, heads // kv, size).permute(2, 0, 3, 1, 4).reshape(kv, blocks, -1, size)
        q = q * size**-0.5
        own_k, own_v = own_k.permute(2, 0, 1, 3), own_v.permute(2, 0, 1, 3)
        far = (q.flatten(1, 2) @ k.permute(1, 2, 0)).view(kv, blocks, -1, span)
        far = far.masked_fill(~seen[None, :, None], -torch.inf)
        weights = torch.cat([far, q @ own_k.transpose(2, 3)], -1).softmax(-1)
        mixed = (weights[..., :span].flatten(1, 2) @ v.transpose(0, 1)).view_as(q) + weights[..., span:] @ own_v
        mixed = mixed.view(kv, blocks, heads // kv, rows, size).permute(1, 3, 0, 2, 4)
        out: Tensor = self.o_proj(mixed.reshape(blocks, rows, heads * size))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = product(config.hidden_size, config.intermediate_size)
        self.up_proj = product(config.hidden_size, config.intermediate_size)
        self.down_proj = product(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer of the backbone in Qwen3 form."""

    def __init__(self, config: DraftConfig, shape: Attention) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(config, shape), Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.eps)

    def forward(self, x: Tensor, context: Tensor, rope: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """See `SelfAttention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), context, rope, positions, seen)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """The sequential head; gated and rnn forms as in `sglang_dspark.draft.heads`. Starts as no bias at all (W2 = 0)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, d, vocab = config.markov_rank, config.hidden_size, config.vocab_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = product(rank, vocab)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)
        if self.kind == "gated":
            self.gate_proj = product(d + rank, rank, bias=True)
        elif self.kind == "rnn":
            self.joint_proj = product(d + 2 * rank, 3 * rank, bias=True)

    def latent(self, z: Tensor, hidden: Tensor) -> Tensor:
        """What W2 turns into a bias [N, γ, r], of W1[x_{k-1}] `z` [N, γ, r] and hidden states [N, γ, d]."""
        if self.kind == "vanilla":
            return z
        if self.kind == "gated":
            return z * torch.sigmoid(self.gate_proj(torch.cat([hidden, z], -1)))
        state, out = torch.zeros_like(z[:, 0]), []
        for k in range(z.shape[1]):
            state, latent = self.step(state, z[:, k], hidden[:, k])
            out.append(latent)
        return torch.stack(out, 1)

    def step(self, state: Tensor, z: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the recurrent form: the new state and the latent."""
        gate, candidate, out = self.joint_proj(torch.cat([state, z, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(out)


class ConfidenceHead(nn.Module):
    """c_k = σ(w·[h_k ; W1[x_{k-1}]] + b)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = product(inputs, 1, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] -> logits [...]."""
        out: Tensor = self.proj(features).squeeze(-1)
        return out


class TrainableDraft(nn.Module):
    """A draft in training; `embedding` [V, d] is the target's, frozen. Raises ValueError for other backbones."""

    rope: Tensor
    embedding: Tensor

    def __init__(self, config: DraftConfig, embedding: Tensor, positions: int) -> None:
        super().__init__()
        if config.backbone != "qwen3" or any(a.window for a in config.attention):
            raise ValueError("training makes drafts with a Qwen3 backbone and full attention")
        self.config = config
        self.register_buffer("embedding", embedding.detach().float(), persistent=False)
        self.register_buffer("rope", rope_table(config, config.attention[0], positions).float(), persistent=False)
        self.fc = product(config.feature_size, config.hidden_size)
        self.hidden_norm, self.norm = Norm(config.hidden_size, config.eps), Norm(config.hidden_size, config.eps)
        self.layers = nn.ModuleList(Layer(config, shape) for shape in config.attention)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(width) if config.confidence else None

    def forward(self, features: Tensor, tokens: Tensor, anchors: Tensor, rows: int) -> Tensor:
        """Hidden states [N, rows, d] after the final norm.

        `features` [S, m·d] and `tokens` [S] are a sequence's, `anchors` [N] positions in it. The block of anchor a sees
        the features before a, as in decoding, where those of the anchor are not known yet.
        """
        context = self.hidden_norm(self.fc(features))
        positions = anchors[:, None] + torch.arange(rows, device=anchors.device)
        block = torch.full_like(positions, self.config.mask_token_id)
        block[:, 0] = tokens[anchors]
        x = F.embedding(block, self.embedding)
        seen = torch.arange(features.shape[0], device=anchors.device) < anchors[:, None]
        for layer in self.layers:
            x = layer(x, context, self.rope, positions, seen)
        out: Tensor = self.norm(x)
        return out

    def latent(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The sequential head's latent [N, γ, r] and the confidence logits [N, γ], given the tokens before each row.

        `previous` [N, γ] holds x_{k-1}: the anchor first.
        """
        z = self.markov_head.markov_w1(previous) if self.markov_head is not None else None
        latent = None if self.markov_head is None or z is None else self.markov_head.latent(z, hidden)
        if self.confidence_head is None:
            return latent, None
        judged = hidden if z is None or not self.config.confidence_with_markov else torch.cat([hidden, z], -1)
        return latent, self.confidence_head(judged)
