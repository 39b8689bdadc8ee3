"""The distribution that a request asks for, and the random numbers that it is sampled with.

What a request's parameters mean, in this order (as in vLLM and transformers, except that vLLM puts the bias first):

1. repetition penalty over prompt and output tokens: positive logits are divided by it, negative ones multiplied;
2. frequency penalty times a token's count in the output, and presence penalty if it is there at all, are subtracted;
3. the logit bias is added;
4. logits are divided by the temperature (none of what follows matters to greedy decoding: the argmax stands);
5. top-k: a token stays if fewer than k tokens have a greater logit;
6. top-p: of what is left, renormalised, a token stays if those more probable than it hold less than p together;
7. min-p: of what is left, a token stays if its probability is at least min_p times the greatest.

Rules 5 and 6 keep or drop equal logits together, so the result is a function of the logits and not of a sort's order.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch

from sglang_dspark.errors import InputError

SORTED_WHOLE = 4096
"""Vocabularies up to this size are sorted whole for top-p; larger ones are thinned first."""

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: dividing by them says nothing more and overflows."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Raises InputError that names the field that cannot be used.

    `top_k` 0, `top_p` 1, `min_p` 0 and the penalties 1, 0 and 0 switch themselves off. `logit_bias` may be given as a
    mapping and is kept as sorted pairs. Without a `seed`, `with_seed` draws one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, lambda x: x >= 0, "a number of at least 0, where 0 is greedy")
        _check("top_k", self.top_k, lambda x: x >= 0, "a whole number of at least 0 (0: off)", whole=True)
        _check("top_p", self.top_p, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
        _check("min_p", self.min_p, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        _check("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "a number above 0")
        _check("presence_penalty", self.presence_penalty, lambda x: -2 <= x <= 2, "a number from -2 to 2")
        _check("frequency_penalty", self.frequency_penalty, lambda x: -2 <= x <= 2, "a number from -2 to 2")
        bias = dict(self.logit_bias)
        for token, value in bias.items():
            _check("A token of logit_bias", token, lambda x: x >= 0, "a token id", whole=True)
            _check(f"logit_bias of token {token}", value, lambda x: -100 <= x <= 100, "a number from -100 to 100")
        object.__setattr__(self, "logit_bias", tuple(sorted(bias.items())))
        if self.seed is not None:
            _check("seed", self.seed, lambda x: -(2**63) <= x < 2**63, "a whole number of 64 bits", whole=True)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax of the processed logits."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens before them by a penalty."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the model's own logits."""
        return self.greedy and not self.penalised and not self.logit_bias

    def with_seed(self) -> SamplingParams:
        """These parameters with a seed: their own, or a fresh one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def _check(name: str, value: object, fits: Callable[[float], bool], wanted: str, *, whole: bool = False) -> None:
    kind = int if whole else int | float
    if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value) or not fits(value):
        raise InputError(f"{name} is {value!r}, but must be {wanted}.")


def penalise(
    logits: torch.Tensor, params: SamplingParams, prompt_counts: torch.Tensor, output_counts: torch.Tensor
) -> torch.Tensor:
    """Logits [..., V] after the repetition, frequency and presence penalties, float32.

    The counts [..., V] say how often each token stands in the prompt, and in the output so far.
    """
    logits = logits.float()
    in_output = output_counts > 0
    weakened = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    logits = torch.where((prompt_counts > 0) | in_output, weakened, logits)
    return logits - params.frequency_penalty * output_counts - params.presence_penalty * in_output


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What the next token is drawn from, [..., V] in float32, given logits [..., V] after penalties and bias.

    Temperature, top-k, top-p and min-p; all mass on the argmax where `params` are greedy. Each row depends on its own
    logits only, to the last bit.
    """
    if params.greedy:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits.float() / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        floor = logits.topk(params.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    probs = logits.softmax(-1)
    if params.top_p == 1 and params.min_p == 0:
        return probs
    floor = params.min_p * probs.amax(-1, keepdim=True)
    if params.top_p < 1:
        floor = torch.maximum(floor, _top_p_floor(probs, params.top_p))
    return logits.masked_fill(probs < floor, -torch.inf).softmax(-1)


def _top_p_floor(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least probability [..., 1] that top-p keeps."""
    vocab = probs.shape[-1]
    if vocab <= SORTED_WHOLE:
        return _floor_of_sorted(probs.sort(-1, descending=True).values, top_p)
    rows = [_floor_of_sorted(_heaviest(row, top_p), top_p) for row in probs.reshape(-1, vocab)]
    return torch.stack(rows).view(*probs.shape[:-1], 1)


def _heaviest(row: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities of `row` [V] in falling order, down to some that hold `top_p` beyond any rounding: few, mostly."""
    for least in (1e-2, 1e-3, 1e-4, 1e-5, 0.0):
        kept = row[row >= least]
        if least == 0 or float(kept.sum()) > top_p + 1e-5:
            break
    return kept.sort(descending=True).values


def _floor_of_sorted(falling: torch.Tensor, top_p: float) -> torch.Tensor:
    """The last of the falling probabilities [..., n] before which less than `top_p` is held: [..., 1]."""
    before = (falling.cumsum(-1) < top_p).sum(-1, keepdim=True)
    return falling.gather(-1, before.clamp(max=falling.shape[-1] - 1))


def sample(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Tokens [...] by the inverse of the cumulative distribution of `probs` [..., V] at the uniforms `u` [...].

    `probs` need not sum to one, but each row must hold something. A token of probability zero is never returned,
    whatever the rounding of the sums and however near to 1 `u` is.
    """
    u = beside(u, probs)
    cdf = probs.cumsum(-1, dtype=u.dtype)
    total = cdf[..., -1:]
    level = torch.minimum(u.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, level, right=True)
    # A device that sums in parallel may round upwards across a token of no mass.
    return torch.where(probs.gather(-1, token) > 0, token, probs.argmax(-1, keepdim=True)).squeeze(-1)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of the greatest of logits [..., V]: tokens [...], int64 on the logits' device."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    # NumPy's takes a fiftieth of the time that PyTorch's takes on a CPU.
    return torch.from_numpy(np.asarray(logits.detach().float().numpy().argmax(-1)))


def beside(u: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """The uniforms `u` on the device of `probs`, in float64 where that device has it (Metal has not)."""
    return u.to(probs.device, torch.float32 if probs.device.type == "mps" else torch.float64)


class Purpose(IntEnum):
    """What a random number is for; numbers for different purposes are independent."""

    DRAFT = 0
    """Drawing a draft token, keyed by its position and its block's anchor: a position may be drafted again."""
    ACCEPT = 1
    """Accepting the draft at a position."""
    TARGET = 2
    """Drawing the target's own token at a position."""


def uniforms(seed: int, purpose: Purpose, start: int, count: int, anchor: int = 0) -> torch.Tensor:
    """Uniform numbers in [0, 1) for the positions `start`, …, `start + count - 1`: float64 [count] on the CPU.

    Each is a function of (seed, purpose, its position, anchor) alone, by the counter-based Philox generator, so it does
    not matter how rounds were cut. `anchor` is the position of a block's anchor where the purpose is DRAFT.
    """
    key = np.array([seed % 2**64, purpose], dtype=np.uint64)
    counter = np.array([start, anchor, 0, 0], dtype=np.uint64)
    # The generator makes four words a counter; the first of each is enough.
    words = np.random.Philox(key=key, counter=counter).random_raw(4 * count)[::4]
    return torch.from_numpy((words >> np.uint64(11)) * 2.0**-53)


def count_rows(counts: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Counts [..., m+1, V]: row i adds the tokens `drafted[..., :i]` to `counts` [..., V]. `drafted` is [..., m]."""
    m = drafted.shape[-1]
    rows = counts.unsqueeze(-2).repeat_interleave(m + 1, -2)
    earlier = torch.ones(m + 1, m, dtype=counts.dtype, device=counts.device).tril(-1)
    index = drafted.unsqueeze(-2).expand(*drafted.shape[:-1], m + 1, m)
    return rows.scatter_add_(-1, index, earlier.expand_as(index))


class History:
    """What one request has said so far, as far as its penalties and bias care.

    Keeps two vectors [V] of counts if there are penalties, one of biases if there are biases, and nothing otherwise.
    Raises InputError for a bias on a token outside the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.params = params
        self._device = torch.device(device)
        bias = dict(params.logit_bias)
        if bias and max(bias) >= vocab_size:
            raise InputError(f"logit_bias names token {max(bias)}, but the vocabulary has only {vocab_size} tokens.")
        if bias:
            self._bias = torch.zeros(vocab_size, device=device)
            self._bias[list(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        if params.penalised:
            self._output = torch.zeros(vocab_size, device=device)
            self._prompt = self._add(self._output, self._ids(prompt))

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens of the output."""
        if self.params.penalised:
            self._output = self._add(self._output, self._ids(tokens))

    def process(self, logits: torch.Tensor, drafted: Sequence[int] = ()) -> torch.Tensor:
        """Logits [n, V] after penalties and bias; the argument itself if there are none.

        The last row follows the history and all of `drafted` (at least n-1 tokens), each row before it one token fewer.
        So a verification passes its k drafts and k+1 rows, and a draft step the drafts before it and one row.
        """
        if self.params.penalised:
            ids = self._ids(drafted)
            # Only the columns of tokens that were seen change, and they are few.
            seen = self._add(self._prompt + self._output, ids).nonzero().squeeze(-1)
            known, later = torch.searchsorted(seen, ids).tensor_split([len(drafted) - len(logits) + 1])
            counts = count_rows(self._add(self._output[seen], known), later)
            logits = logits.to(torch.float32, copy=True)
            logits[:, seen] = penalise(logits[:, seen], self.params, self._prompt[seen], counts)
        return logits.float() + self._bias if self.params.logit_bias else logits

    @staticmethod
    def _add(counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return counts.index_add(0, ids, torch.ones_like(ids, dtype=counts.dtype))

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=self._device)
