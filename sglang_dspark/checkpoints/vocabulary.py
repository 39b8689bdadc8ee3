"""A reduced draft vocabulary made whole, exactly: rows for the tokens that it lacks, which can never be drafted.

The Markov head is given more ranks, of which the first is a constant: W1[x] is 1 there for every x, and W2 is 0 for
tokens of the reduced vocabulary and -∞ for the rest. So B = W1 W2 is what it was, or -∞. A gate is held at 1 (its bias
is +∞) and an RNN's output at tanh(+∞) = 1. Rows of lm_head that are missing become zeros: 0 + -∞ = -∞.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_dspark.checkpoints.drafts import D2T, Draft, Listed
from sglang_dspark.checkpoints.tensors import Readable, Virtual
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

EXTRA = 16
"""Ranks that are added: one would do, but kernels like multiples."""
MARKOV = "markov_head."


def vocabulary_ids(draft: Draft, full: int) -> Tensor:
    """The target ids [draft vocabulary] of a reduced draft's tokens. Raises InputError if they cannot be that."""
    if D2T not in draft.tensors:
        raise InputError(f"{draft.name} has a vocabulary of its own but no d2t that says which tokens; fetch it again.")
    table = draft.tensors[D2T]
    if len(table.shape) != 1 or table.count != draft.reduced:
        raise InputError(f"d2t in {draft.name} has shape {list(table.shape)}, not [{draft.reduced}]; fetch it again.")
    ids = table.read(0, table.count)
    if ids.is_floating_point() or bool((ids[1:] <= ids[:-1]).any()) or ids[0] < 0 or ids[-1] >= full:
        raise InputError(f"d2t in {draft.name} is no ascending list of token ids below {full}; fetch it again.")
    return ids


def whole(draft: Draft, config: DraftConfig) -> Draft:
    """The same draft with the target's vocabulary. `config` is the reduced draft's."""
    ids = vocabulary_ids(draft, config.vocab_size)
    rank, new = config.markov_rank, config.markov_rank + EXTRA
    old = draft.tensors
    dtype = old["lm_head.weight"].dtype
    tensors = {name: t for name, t in old.items() if name != D2T}
    tensors["lm_head.weight"] = scattered(old["lm_head.weight"], ids, config.vocab_size, 0.0)
    w1, w2 = f"{MARKOV}markov_w1.weight", f"{MARKOV}markov_w2.weight"
    tensors[w1] = Virtual(
        old[w1].dtype if rank else dtype,
        (config.vocab_size, new),
        lambda first, last: _joined([old[w1].rows(first, last) if rank else None, _constant(last - first)]),
    )
    present = scattered(old[w2], ids, config.vocab_size, 0.0) if rank else None
    barred = _absence(ids, config.vocab_size)
    tensors[w2] = Virtual(
        old[w2].dtype if rank else dtype,
        (config.vocab_size, new),
        lambda first, last: _joined([present.rows(first, last) if present else None, barred(first, last)]),
    )
    tensors |= _heads(old, config)
    fields = dict(draft.reading.fields) | {"markov_rank": new, "draft_vocab_size": None}
    if not rank:
        fields["markov_head_type"] = "vanilla"
    return replace(draft, tensors=tensors, reading=replace(draft.reading, fields=fields))


def scattered(table: Readable, ids: Tensor, full: int, fill: float) -> Virtual:
    """`table`'s rows [len(ids), columns] at the places `ids` of a table of `full` rows."""

    def make(first: int, last: int) -> Tensor:
        begin, end = (int(torch.searchsorted(ids, n)) for n in (first, last))
        out = torch.full((last - first, table.columns), fill, dtype=table.dtype)
        if end > begin:
            out[ids[begin:end] - first] = table.rows(begin, end)
        return out

    return Virtual(table.dtype, (full, table.columns), make)


def _heads(old: Listed, config: DraftConfig) -> dict[str, Readable]:
    """The small matrices that see or make ranks, with room for the new ones."""
    rank = config.markov_rank
    made: dict[str, Readable] = {}
    if config.markov_head_type == "gated":
        weight, bias = (_whole(old[f"{MARKOV}gate_proj.{part}"]) for part in ("weight", "bias"))
        made[f"{MARKOV}gate_proj.weight"] = _memory(pad(weight, (0, EXTRA, 0, EXTRA)))
        made[f"{MARKOV}gate_proj.bias"] = Virtual.of(torch.cat([bias, _held(bias.dtype)]))
    if config.markov_head_type == "rnn":
        weight, bias = (_whole(old[f"{MARKOV}joint_proj.{part}"]) for part in ("weight", "bias"))
        state, previous, hidden = torch.split(weight, [rank, rank, config.hidden_size], -1)
        wide = torch.cat([pad(state, (0, EXTRA)), pad(previous, (0, EXTRA)), hidden], -1)
        grown = [pad(w, (0, 0, 0, EXTRA)) for w in torch.split(wide, rank)]
        made[f"{MARKOV}joint_proj.weight"] = _memory(torch.cat(grown))
        gate, candidate, output = (pad(b, (0, EXTRA)) for b in torch.split(bias, rank))
        output[rank:] = _held(bias.dtype)
        made[f"{MARKOV}joint_proj.bias"] = Virtual.of(torch.cat([gate, candidate, output]))
    if config.confidence_with_markov:
        name = "confidence_head.proj.weight"
        made[name] = _memory(pad(_whole(old[name]), (0, EXTRA)))
    return made


def _held(dtype: torch.dtype) -> Tensor:
    """Biases of the new ranks: what they feed is 1 at the first, whatever is seen, and takes no part at the others."""
    return torch.tensor([torch.inf] + [0.0] * (EXTRA - 1), dtype=dtype)


def _whole(tensor: Readable) -> Tensor:
    return tensor.read(0, tensor.count).view(tensor.shape)


def _memory(matrix: Tensor) -> Virtual:
    return Virtual(matrix.dtype, tuple(matrix.shape), lambda first, last: matrix[first:last])


def _constant(rows: int) -> Tensor:
    extra = torch.zeros(rows, EXTRA)
    extra[:, 0] = 1.0
    return extra


def _absence(ids: Tensor, full: int) -> Callable[[int, int], Tensor]:
    absent = torch.ones(full, dtype=torch.bool)
    absent[ids] = False

    def make(first: int, last: int) -> Tensor:
        extra = torch.zeros(last - first, EXTRA)
        extra[absent[first:last], 0] = -torch.inf
        return extra

    return make


def _joined(parts: list[Tensor | None]) -> Tensor:
    there = [p for p in parts if p is not None]
    return torch.cat([p.to(there[0].dtype) for p in there], -1)
