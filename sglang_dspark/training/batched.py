"""Decodes many sequences at once, each at its own length, for text to train on: a slot is refilled when it is free.

The caches are allocated once. Attention over them is compiled C++ where there is a compiler, because sequences of
unequal lengths leave a padded product mostly padding; without one it is that padded product. Generation is bound by
arithmetic, so products may be done in 8-bit integers (a scale for each row and each output), several times as fast on a
CPU: the text then differs a little from the target's own, as a quantised copy's does; training reads the target itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.errors import InputError
from sglang_dspark.native.build import SOURCE, find_compiler, load_kernel

BATCHED = SOURCE.with_name("batched.cpp")
TILE = 16
"""Positions that the cache keeps side by side in its keys (batched.cpp)."""
COMPILED_SIZES = (32, 64, 128)
FAMILIES = ("llama", "qwen3")


class Product:
    """x [n, in] -> x Wᵀ [n, out], in the weight's precision or, with `quantised`, in 8-bit integers."""

    def __init__(self, weight: Tensor, quantised: bool) -> None:
        self.weight, self.scale = weight, torch.empty(0)
        if quantised:
            self.scale = weight.abs().amax(1) / 127
            self.weight = (weight / self.scale[:, None]).round().to(torch.int8).t()

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        if not len(self.scale):
            return F.linear(x, self.weight)
        scale = x.abs().amax(1, keepdim=True) / 127
        whole = torch._int_mm((x / scale).round_().to(torch.int8), self.weight)
        return whole.float().mul_(scale).mul_(self.scale)


class BatchedDecoder:
    """A transformers causal LM in Llama or Qwen3 form with room for `slots` sequences of `capacity` tokens.

    `lengths` [slots] counts the tokens of each. The arithmetic is the model's precision, the caches are bfloat16.
    """

    def __init__(
        self, model: Any, slots: int, capacity: int, *, quantised: bool = False, compiled: bool = True
    ) -> None:
        """Raises InputError for a model of another form, or too long a capacity."""
        config = model.config
        if config.model_type not in FAMILIES:
            raise InputError(
                f"Batched generation runs Llama- and Qwen3-shaped targets, and this one is {config.model_type};"
                " give prompts and answers of your own with --data."
            )
        if capacity > config.max_position_embeddings:
            raise InputError(
                f"Sequences of {capacity} tokens do not fit the target's {config.max_position_embeddings} positions."
            )
        self.model, self.slots, self.capacity = model, slots, capacity
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        weight = model.model.embed_tokens.weight
        tiled = (slots, self.kv_heads, -(-capacity // TILE), self.size, TILE)
        self.caches = [
            (
                weight.new_zeros(tiled, dtype=torch.bfloat16),
                weight.new_zeros(slots, self.kv_heads, tiled[2] * TILE, self.size, dtype=torch.bfloat16),
            )
            for _ in model.model.layers
        ]
        self.lengths = torch.zeros(slots, dtype=torch.long, device=weight.device)
        cos, sin = model.model.rotary_emb(weight[:1][None], torch.arange(capacity, device=weight.device)[None])
        self.cos, self.sin = cos[0], sin[0]
        self._rows = torch.arange(slots, device=weight.device)
        self._prefix: tuple[int, ...] = ()
        self._kept: list[tuple[Tensor, Tensor]] = []
        fits = weight.device.type == "cpu" and weight.dtype is torch.float32 and self.size in COMPILED_SIZES
        self._library = load_kernel(source=BATCHED) if compiled and fits and find_compiler() else None
        self.layers = [
            [
                Product(weight, quantised)
                for weight in (
                    torch.cat(
                        [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
                    ),
                    layer.self_attn.o_proj.weight,
                    torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                    layer.mlp.down_proj.weight,
                )
            ]
            for layer in model.model.layers
        ]
        self.head = Product(model.lm_head.weight, quantised)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [slots], one to each sequence; return the logits after them [slots, V] in float32."""
        inner = self.model.model
        x = F.embedding(tokens.to(self.lengths.device), inner.embed_tokens.weight)
        at = self.lengths
        cos, sin = self.cos[at].unsqueeze(1), self.sin[at].unsqueeze(1)
        for layer, cache, products in zip(inner.layers, self.caches, self.layers, strict=True):
            x = self._layer(layer, cache, products, x, cos, sin)
        self.lengths += 1
        x = F.rms_norm(x, x.shape[1:], inner.norm.weight, self.eps)
        return self.head(x).float()

    def restart(self, slot: int, prefix: Sequence[int]) -> None:
        """Let `slot` begin anew, with the tokens `prefix` behind it. The prefix is read once, and then copied."""
        prefix = tuple(prefix)
        if prefix != self._prefix:
            self._prefix = prefix
            self._kept = self._read(prefix)
        for (keys, values), (k, v) in zip(self.caches, self._kept, strict=bool(prefix)):
            keys[slot, :, : k.shape[1]], values[slot, :, : v.shape[1]] = k, v
        self.lengths[slot] = len(prefix)

    def _read(self, prefix: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of `prefix`, computed in the slots, whose lengths are put back."""
        before = self.lengths.clone()
        self.lengths.zero_()
        if prefix and before.any():
            raise ValueError("a prefix is read before anything else is in the slots")
        for token in prefix:
            self.step(torch.full((self.slots,), token, device=self.lengths.device))
        self.lengths.copy_(before)
        tiles = -(-len(prefix) // TILE)
        return [(keys[0, :, :tiles].clone(), values[0, :, : len(prefix)].clone()) for keys, values in self.caches]

    def _layer(
        self, layer: Any, cache: tuple[Tensor, Tensor], products: list[Product], x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        attention, (keys, values), (qkv, out, gate_up, down) = layer.self_attn, cache, products
        n = self.heads + self.kv_heads
        rows = qkv(F.rms_norm(x, x.shape[1:], layer.input_layernorm.weight, self.eps)).view(self.slots, -1, self.size)
        turned, v = rows[:, :n], rows[:, n:]
        if hasattr(attention, "q_norm"):
            norm = torch.stack([attention.q_norm.weight] * self.heads + [attention.k_norm.weight] * self.kv_heads)
            turned = F.rms_norm(turned, (self.size,), None, self.eps) * norm
        left, right = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-right, left], -1) * sin
        keys[self._rows, :, self.lengths // TILE, :, self.lengths % TILE] = turned[:, self.heads :].to(keys.dtype)
        values[self._rows, :, self.lengths] = v.to(values.dtype)
        mixed = self._attend(turned[:, : self.heads].contiguous(), keys, values)
        x = x + out(mixed.reshape(self.slots, -1))
        gate, up = gate_up(F.rms_norm(x, x.shape[1:], layer.post_attention_layernorm.weight, self.eps)).chunk(2, -1)
        return x + down(F.silu(gate).mul_(up))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [slots, heads, size] over each slot's own rows, the new one included."""
        lengths = self.lengths + 1
        if self._library is None:
            span = int(lengths.max())
            seen = torch.arange(span, device=q.device) < lengths[:, None]
            return F.scaled_dot_product_attention(
                q.unsqueeze(2),
                keys.transpose(3, 4).flatten(2, 3)[:, :, :span].to(q.dtype),
                values[:, :, :span].to(q.dtype),
                attn_mask=seen[:, None, None],
                enable_gqa=True,
            ).squeeze(2)
        out = torch.empty_like(q)
        self._library.dspark_batched_attention(
            *(ctypes.c_void_p(t.data_ptr()) for t in (q, keys, values, lengths, out)),
            self.slots,
            self.heads,
            self.kv_heads,
            self.size,
            ctypes.c_int64(values.shape[2]),
        )
        return out


class OneByOneDecoder:
    """The same for a causal LM of any form: each sequence has a transformers cache and a forward of its own."""

    def __init__(self, model: Any, slots: int, capacity: int) -> None:
        self.model, self.slots, self.capacity = model, slots, capacity
        self.device = model.get_output_embeddings().weight.device
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.caches: list[Any] = [None] * slots

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """See `BatchedDecoder.step`."""
        rows = []
        for slot, token in enumerate(tokens.tolist()):
            self.tokens[slot].append(token)
            new = self.tokens[slot] if self.caches[slot] is None else [token]
            ids = torch.tensor([new], device=self.device)
            out = self.model(ids, past_key_values=self.caches[slot], use_cache=True, logits_to_keep=1)
            self.caches[slot] = out.past_key_values
            rows.append(out.logits[0, -1].float())
        return torch.stack(rows)

    def restart(self, slot: int, prefix: Sequence[int]) -> None:
        """See `BatchedDecoder.restart`."""
        self.tokens[slot], self.caches[slot] = list(prefix), None


Decoder = BatchedDecoder | OneByOneDecoder


def decoder(model: Any, slots: int, capacity: int, *, quantised: bool) -> Decoder:
    """The quicker of the two that runs `model`."""
    if model.config.model_type in FAMILIES:
        return BatchedDecoder(model, slots, capacity, quantised=quantised)
    return OneByOneDecoder(model, min(slots, 4), capacity)
