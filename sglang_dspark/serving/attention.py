"""Attention of a few new rows a request over a paged cache, in torch, for the CPU: verification, drafting, decoding and
prefill are one arithmetic with different widths.

A batch is padded to one rectangle, so that no loop runs over tokens or requests; requests whose lengths differ so much
that padding would more than double the work, and prefill, whose rows are many, get a rectangle each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FOLD = 32
"""Up to how many rows heads that share keys become rows of one head. Beyond it the mask would grow too much."""
WASTE = 2.0
"""How much more work than without padding a rectangle may be."""


@dataclass
class Rectangle:
    """Requests computed as one: `starts` [r] are the positions of their first rows, `widths` [r] their numbers of rows,
    `first` the batch's row where theirs begin. Keys of a request are positions 0..start + width - 1, in cache rows
    `slots` [r, keys], padded at will.
    """

    starts: Tensor
    widths: Tensor
    slots: Tensor
    first: int
    rows: int
    _masks: dict[tuple[bool, int | None], Tensor | None] = field(default_factory=dict)

    @cached_property
    def places(self) -> Tensor | None:
        """Where in the rectangle, flattened, the rows are [rows]; None where they fill it."""
        requests, width = self.widths.numel(), self.width
        if self.rows == requests * width:
            return None
        return (torch.arange(width) < self.widths[:, None]).flatten().nonzero().flatten()

    @cached_property
    def width(self) -> int:
        """Rows of the widest request."""
        return int(self.widths.max())

    def mask(self, causal: bool, window: int | None) -> Tensor | None:
        """Which keys each row sees [r, 1, width, keys], or None for all. A row at p sees key j if j is one of its
        request's, |p - j| <= window, and j <= p where attention is causal.
        """
        kind = (causal, window)
        if kind not in self._masks:
            self._masks[kind] = self._mask(causal, window)
        return self._masks[kind]

    def _mask(self, causal: bool, window: int | None) -> Tensor | None:
        lengths = self.starts + self.widths
        keys = torch.arange(self.slots.shape[1])
        rows = (self.starts[:, None] + torch.arange(self.width))[:, :, None]
        seen = (keys < lengths[:, None])[:, None].expand(-1, self.width, -1)
        if causal:
            seen = seen & (keys <= rows)
        if window is not None:
            seen = seen & ((rows - keys).abs() <= window)
        return None if bool(seen.all()) else seen[:, None]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, kind: Kind) -> Tensor:
        """Rows q [rows, heads, d] over cache rows keys [·, kv, d] and values [·, kv, dv] -> [rows, heads, dv]."""
        r, w, heads, kv = self.widths.numel(), self.width, q.shape[1], keys.shape[1]
        if self.places is not None:
            packed = q.new_zeros(r * w, heads, q.shape[2])
            packed[self.places] = q
            q = packed
        k, v = (c[slots].to(q.dtype).transpose(1, 2) for c in (keys, values))
        mask, group = self.mask(kind.causal, kind.window), heads // kv
        if w <= FOLD:
            folded = q.view(r, w, kv, group, -1).permute(0, 2, 3, 1, 4).reshape(r, kv, group * w, -1)
            allowed = mask if mask is None or group == 1 else mask.repeat(1, 1, group, 1)
            out = scaled_dot_product_attention(folded, k, v, attn_mask=allowed, scale=kind.scale)
            out = out.view(r, kv, group, w, -1).permute(0, 3, 1, 2, 4)
        else:
            turned = q.view(r, w, heads, -1).transpose(1, 2)
            out = scaled_dot_product_attention(
                turned, k, v, attn_mask=mask, scale=kind.scale, enable_gqa=group > 1
            ).transpose(1, 2)
        out = out.reshape(r * w, heads, -1)
        return out if self.places is None else out[self.places]


@dataclass(frozen=True, slots=True)
class Kind:
    """How a layer attends: `window` w limits row p to keys |p - j| <= w."""

    scale: float
    causal: bool
    window: int | None = None


@dataclass
class Plan:
    """A batch's rectangles, made once a forward and used by all layers. `translated` holds their slots in another
    cache's numbering, where a layer has one.
    """

    rectangles: Sequence[Rectangle]

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, kind: Kind, translated: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Rows q [n, heads, d], request after request -> [n, heads, dv]. Rows after the last request's are padding and
        give zeros.
        """
        slots = [r.slots for r in self.rectangles] if translated is None else translated
        parts = [
            r.attend(q[r.first : r.first + r.rows], keys, values, s, kind)
            for r, s in zip(self.rectangles, slots, strict=True)
        ]
        done = sum(r.rows for r in self.rectangles)
        if done < q.shape[0]:
            parts.append(q.new_zeros(q.shape[0] - done, q.shape[1], values.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan(table: Tensor, requests: Tensor, starts: Tensor, widths: Tensor, together: bool = True) -> Plan:
    """Plan rows of `requests` [r], which are rows of `table` [·, positions] that holds the cache row of each position.

    `starts` [r] are the positions of first rows, `widths` [r] the numbers of rows, one or more each; `together` allows
    one rectangle for all.
    """
    starts, widths = starts.long(), widths.long()
    lengths, count = (starts + widths).tolist(), widths.tolist()
    whole = max(lengths) * max(count) * len(count) <= WASTE * sum(n * w for n, w in zip(lengths, count, strict=True))
    if len(count) == 1 or (together and whole):
        return Plan([Rectangle(starts, widths, table[requests, : max(lengths)].long(), 0, sum(count))])
    firsts = [sum(count[:i]) for i in range(len(count))]
    return Plan(
        [
            Rectangle(starts[i : i + 1], widths[i : i + 1], table[requests[i : i + 1], :n].long(), firsts[i], count[i])
            for i, n in enumerate(lengths)
        ]
    )
