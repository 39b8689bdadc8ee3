"""The decoding loop that all engines share: draft, schedule, verify, commit, and report it as a Round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from local_runner.engines.base import Draft, Drafter, Request, Target
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import History, Purpose, SamplingParams, argmax, probabilities, sample, uniforms
from sglang_dspark.decoding.verify import accept_greedy, accept_point_mass, accept_sampled
from sglang_dspark.errors import InputError

WINDOW = 1
"""Drafted tokens that are judged at a time when their rows have to be processed first."""

PREFILL_CHUNK = 256
"""Prompt tokens a forward takes at once: bounds the memory of activations and the wait before a cancellation."""


def decode(
    target: Target,
    drafter: Drafter | None,
    request: Request,
    text: Callable[[Sequence[int]], str] | None = None,
    cancelled: threading.Event | None = None,
) -> Iterator[Round]:
    """Decode `request` and yield its Rounds, the prefill first.

    Without a drafter or a schedule each round commits the target's own next token. With both, a round drafts a block,
    verifies the scheduled prefix in one forward, and commits what `sglang_dspark.decoding.verify` accepts. `text` turns
    new tokens into new text and is needed for stop strings. A set `cancelled` ends the rounds at the next boundary.
    Raises InputError for a request that this target cannot decode.
    """
    check(target, drafter, request)
    target.reset()
    active = drafter if request.schedule is not None else None
    if active is not None:
        active.reset()
    cancelled = cancelled or threading.Event()
    picker = Picker(request.sampling.with_seed(), request, target)
    stops = Stops(request, target.context_length, text)

    began = time.perf_counter()
    prompt = request.prompt_ids
    logits = torch.empty(0)
    for start in range(0, len(prompt), PREFILL_CHUNK):
        if cancelled.is_set():
            return
        chunk = prompt[start : start + PREFILL_CHUNK]
        logits = target.forward(chunk, last_only=True)
        if active is not None:
            active.observe(len(chunk))
    position = len(prompt) - 1
    _, anchor = picker.verify(logits, [], position)
    committed, stop = stops.cut((anchor,), position)
    picker.history.extend(committed)
    seconds = time.perf_counter() - began
    yield Round(request.name, 0, position, prompt[-1], (), (), 0, 0, anchor, committed, stop, 0.0, seconds)

    index = 0
    while stop is None and not cancelled.is_set():
        index, position = index + 1, target.length
        began = time.perf_counter()
        draft = Draft([])
        scheduled = 0
        if active is not None and request.schedule is not None:
            draft = active.draft(anchor, position, picker.drafting(position, active.block))
            scheduled = request.schedule.length(draft.confidence, len(draft.tokens))
            scheduled = min(scheduled, target.context_length - position - 1)
        drafted = time.perf_counter()
        logits = target.forward([anchor, *draft.tokens[:scheduled]])
        accepted, token = picker.verify(logits, draft.tokens[:scheduled], position)
        target.truncate(position + 1 + accepted)
        if active is not None:
            active.observe(accepted + 1)
        block = tuple(draft.tokens)
        committed, stop = stops.cut((*block[:accepted], token), position)
        picker.history.extend(committed)
        verified = time.perf_counter()
        yield Round(
            request.name, index, position, anchor, block, tuple(draft.confidence), scheduled, accepted, token,
            committed, stop, drafted - began, verified - drafted,
        )  # fmt: skip
        anchor = token


def check(target: Target, drafter: Drafter | None, request: Request) -> None:
    """Raise InputError unless this target can decode this request."""
    prompt, room = request.prompt_ids, target.context_length
    if not prompt:
        raise InputError("The prompt is empty; give at least one token.")
    if len(prompt) >= room:
        raise InputError(
            f"The prompt has {len(prompt)} tokens, which leaves no room in a context of {room};"
            " shorten it, or raise --context-length."
        )
    outside = [t for t in prompt if not 0 <= t < target.vocab_size]
    if outside:
        raise InputError(f"Prompt token {outside[0]} is outside the target's vocabulary of {target.vocab_size} tokens.")
    if request.max_new_tokens < 1:
        raise InputError(f"The number of new tokens must be at least 1, not {request.max_new_tokens}.")
    if request.schedule is not None and drafter is None:
        raise InputError("DSpark needs a draft model; give one with --draft, or decode plainly.")
    if request.draft_style not in ("greedy", "sampled"):
        raise InputError(f"The draft style is '{request.draft_style}', but must be 'greedy' or 'sampled'.")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run small tensor operations on the calling thread.

    A second thread would save microseconds, and then wait awake for more work on a core that the next forward needs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True)
class Picker:
    """Chooses the tokens of one request: the draft's, and from the target's rows the accepted and the next one."""

    params: SamplingParams
    request: Request
    target: Target
    history: History = field(init=False)
    _q: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(self.params, self.request.prompt_ids, self.target.vocab_size, self.target.device)

    @property
    def _sampled(self) -> bool:
        return self.request.draft_style == "sampled" and not self.params.greedy

    @property
    def _seed(self) -> int:
        assert self.params.seed is not None, "with_seed() gives every request a seed"
        return self.params.seed

    def drafting(self, position: int, block: int) -> Callable[[int, torch.Tensor], int] | None:
        """How the draft after the anchor at `position` chooses its tokens; None stands for its argmax."""
        if self.params.plain_greedy:
            return None
        before: list[int] = []
        self._q.clear()
        u = uniforms(self._seed, Purpose.DRAFT, position + 1, block, anchor=position)

        def choose(k: int, logits: torch.Tensor) -> int:
            with one_thread():
                row = self.history.process(logits.unsqueeze(0), before)
                if self._sampled:
                    self._q.append(probabilities(row, self.params))
                    token = int(sample(self._q[-1], u[k : k + 1]))
                else:
                    token = int(argmax(row))
            before.append(token)
            return token

        return choose

    def verify(self, logits: torch.Tensor, drafted: Sequence[int], position: int) -> tuple[int, int]:
        """How many of `drafted` survive and the token after them, from logits [len(drafted) + 1, V].

        Row i is the target's after the token at `position + i`.
        """
        with one_thread():
            return self._verify(logits, drafted, position)

    def _verify(self, logits: torch.Tensor, drafted: Sequence[int], position: int) -> tuple[int, int]:
        if self.params.plain_greedy:
            return self._accept(logits, drafted, 0, position)
        # Most blocks are rejected early, and a row costs several passes over the vocabulary: look at a few at a time.
        done = 0
        while True:
            window = drafted[done : done + WINDOW]
            rows = self.history.process(logits[done : done + len(window) + 1], drafted[: done + len(window)])
            accepted, token = self._accept(rows, window, done, position)
            done += accepted
            if accepted < len(window) or done == len(drafted):
                return done, token

    def _accept(self, rows: torch.Tensor, drafted: Sequence[int], first: int, position: int) -> tuple[int, int]:
        """`verify` for the drafts from index `first` on, given processed rows [len(drafted) + 1, V]."""
        k, after = len(drafted), position + first + 1
        block = torch.tensor([drafted], dtype=torch.long, device=rows.device)
        scheduled = torch.tensor([k], device=rows.device)
        if self.params.greedy:
            accepted, token = accept_greedy(argmax(rows).unsqueeze(0), block, scheduled)
            return int(accepted), int(token)
        p = probabilities(rows, self.params).unsqueeze(0)
        u_next = uniforms(self._seed, Purpose.TARGET, after, k + 1).unsqueeze(0)
        if self._sampled and k:
            q = torch.cat(self._q[first : first + k]).unsqueeze(0)
            u_accept = uniforms(self._seed, Purpose.ACCEPT, after, k).unsqueeze(0)
            accepted, token = accept_sampled(p, q, block, scheduled, u_accept, u_next)
        else:
            accepted, token = accept_point_mass(p, block, scheduled, u_next)
        return int(accepted), int(token)


@dataclass(slots=True)
class Stops:
    """Where an answer ends: a stop token, a stop string, the wanted length, or the end of the context."""

    request: Request
    context_length: int
    text: Callable[[Sequence[int]], str] | None
    _tail: str = ""
    _count: int = 0

    def __post_init__(self) -> None:
        if self.request.stop_strings and self.text is None:
            raise InputError("Stop strings need the target's tokenizer, and it has none; use stop token ids.")

    def cut(self, tokens: Sequence[int], position: int) -> tuple[tuple[int, ...], str | None]:
        """The tokens to commit of `tokens`, which follow `position`, and why the answer stops there, if it does."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self._count += 1
            if token in self.request.stop_ids:
                return tuple(kept), "eos"
            if self.request.stop_strings and self._ends(token):
                return tuple(kept), "stop_string"
            if self._count >= self.request.max_new_tokens:
                return tuple(kept), "length"
            if position + len(kept) >= self.context_length:
                return tuple(kept), "context"
        return tuple(kept), None

    def _ends(self, token: int) -> bool:
        """Whether `token` completes a stop string. Only as much text is kept as one may have begun in."""
        assert self.text is not None
        new = self.text([token])
        seen = self._tail + new
        longest = max(map(len, self.request.stop_strings))
        self._tail = seen[-(longest - 1) :] if longest > 1 else ""
        return any(s in seen for s in self.request.stop_strings)
