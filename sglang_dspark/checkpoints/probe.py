"""The acceptance probe: whether the draft says what the target says next, as its file reads and read otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sglang_dspark.checkpoints.findings import Effect, Finding, everywhere
from sglang_dspark.draft.config import DraftConfig

TOKENS = 48
"""Tokens of answer that each prompt is given."""
SHIFTS = (0, -1, 1)
CLEAR, SAME = 4.0, 2.0
"""Standard errors by which another reading has to be likelier before this one is called wrong, and by which it has to
be less likely before it is ruled out.
"""
WEAK = 1.5


class Model(Protocol):
    """A target as the PyTorch engine has it."""

    taps: tuple[int, ...]

    def reset(self) -> None:
        """Forget the cached tokens."""

    def forward(self, tokens: Sequence[int], last_only: bool = False) -> Tensor:
        """Append `tokens`; logits [len(tokens), V], or [1, V] of the last."""

    def features(self, count: int) -> Tensor:
        """The tapped outputs [count, len(taps)·d] of the first `count` tokens of the last forward."""


class Drafter(Protocol):
    """A draft model as `DraftModel` is one."""

    @property
    def config(self) -> DraftConfig:
        """Its description."""

    @property
    def block(self) -> int:
        """γ."""

    def reset(self) -> None:
        """Forget all context."""

    def observe(self, features: Tensor, position: int) -> None:
        """Commit context rows."""

    def draft(self, anchor: int, position: int, choose: Callable[[int, Tensor], int] | None = None) -> Drafted:
        """Draft a block after the anchor; `choose` says which token follows in each row, else the likeliest."""


class Drafted(Protocol):
    """A drafted block."""

    @property
    def tokens(self) -> list[int]:
        """γ ids."""

    @property
    def logits(self) -> Tensor:
        """[γ, V], each row given the tokens before it."""


@dataclass(slots=True)
class Agreement:
    """How often drafts were what the target said. `survived[k]` counts blocks whose first k + 1 drafts all were;
    `late[k]` counts drafts k that are what draft k - 1 should have been. `likelihoods` has for each block the mean
    log-probability, in nats, that the draft gives to what the target said, each token given those before it.
    """

    blocks: int = 0
    survived: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    likelihoods: list[float] = field(default_factory=list)

    def beyond(self, other: Agreement) -> float:
        """By how many standard errors the target's words are likelier than with `other`, on the same blocks.

        γ blocks in a row are about the same tokens, so the mean of such a run counts as one observation.
        """
        gains = torch.tensor(self.likelihoods) - torch.tensor(other.likelihoods)
        runs = torch.split(gains, max(1, len(self.survived)))
        gain = torch.stack([run.mean() for run in runs if len(run) == len(runs[0])])
        if len(gain) < 2 or not float(gain.abs().max()):
            return 0.0
        return float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp_min(1e-9))

    @property
    def survival(self) -> list[float]:
        """The share of blocks that survive up to each position."""
        return [n / self.blocks for n in self.survived] if self.blocks else []

    @property
    def accepted(self) -> float:
        """Mean tokens a round, the target's own included."""
        return 1.0 + sum(self.survival)

    def add(self, drafted: Sequence[int], anchor: int, said: Sequence[int]) -> None:
        """Count one block drafted after `anchor`, which the target continued with `said`."""
        if not self.survived:
            self.survived, self.late = [0] * len(drafted), [0] * len(drafted)
        self.blocks += 1
        alive = True
        for k, (token, truth) in enumerate(zip(drafted, said, strict=True)):
            alive = alive and token == truth
            self.survived[k] += alive
            self.late[k] += k > 0 and token == said[k - 1]


def measure(
    target: Model,
    draft: Drafter,
    prompts: Sequence[Sequence[int]],
    layers: int,
    seconds: float = 60.0,
) -> dict[int, Agreement]:
    """Agreement with the target's greedy continuation of `prompts`, as read and with every tap moved by ±1.

    Shifts that would leave -1..layers-1 are left out. Stops after `seconds`, at the end of a prompt.
    """
    taps = draft.config.target_layer_ids
    shifts = [s for s in SHIFTS if taps[0] + s >= -1 and taps[-1] + s < layers]
    union = sorted({t + s for t in taps for s in shifts})
    before, target.taps = target.taps, tuple(union)
    found = {s: Agreement() for s in shifts}
    end = time.monotonic() + seconds
    try:
        for prompt in prompts:
            tokens, features = _continue(target, prompt, draft.block)
            for shift in shifts:
                columns = _columns(union, [t + shift for t in taps], features.shape[1] // len(union))
                _compare(draft, tokens, features[:, columns], len(prompt), found[shift])
            if time.monotonic() > end:
                break
    finally:
        target.taps = before
    return found


def _continue(target: Model, prompt: Sequence[int], block: int) -> tuple[list[int], Tensor]:
    """The prompt with its greedy continuation, and the features of all tokens but the last."""
    target.reset()
    tokens, features = list(prompt), []
    fed: Sequence[int] = prompt
    for _ in range(TOKENS + block):
        logits = target.forward(fed, last_only=True)
        features.append(target.features(len(fed)).clone())
        tokens.append(int(logits[-1].float().argmax()))
        fed = tokens[-1:]
    return tokens, torch.cat(features)


def _columns(union: list[int], taps: list[int], width: int) -> Tensor:
    return torch.cat([torch.arange(width) + union.index(t) * width for t in taps])


def _compare(draft: Drafter, tokens: list[int], features: Tensor, prompt: int, found: Agreement) -> None:
    draft.reset()
    draft.observe(features[:prompt], 0)
    for position in range(prompt, prompt + TOKENS):
        anchor = tokens[position]
        said = tokens[position + 1 : position + 1 + draft.block]
        if len(said) < draft.block:
            break
        found.add(draft.draft(anchor, position).tokens, anchor, said)
        block = draft.draft(anchor, position, _follow(said))
        rows = block.logits.float().log_softmax(-1)
        found.likelihoods.append(float(rows.gather(1, torch.tensor(said, device=rows.device)[:, None]).mean()))
        draft.observe(features[position : position + 1], position)


def _follow(tokens: Sequence[int]) -> Callable[[int, Tensor], int]:
    return lambda k, logits: tokens[k]


def acceptance(found: dict[int, Agreement]) -> Iterator[Finding]:
    """With both models at hand, drafts are compared with what the target says next, as the file reads and otherwise.

    A convention that is read wrongly shows: with layers off by one, the target's words grow likelier when every tap is
    moved to its neighbour (compared block by block, because acceptance alone is too coarse); with an anchor that has a
    row of its own, position 0 is dead and later drafts fit one place earlier. A weak head shows low acceptance at every
    reading. Some heads draft as well from the layers beside theirs: then nothing can tell, and that is said.
    """
    read = found[0]
    if not read.blocks:
        yield Finding("acceptance", "note", "No block was drafted, so acceptance is not known.")
        return
    shape = ", ".join(f"{100 * s:.0f}%" for s in read.survival)
    others = {shift: of.beyond(read) for shift, of in found.items() if shift}
    best = max(others, key=lambda shift: others[shift], default=0)
    late = sum(read.late[1:]) / (read.blocks * max(1, len(read.late) - 1))
    measured = f"{read.accepted:.2f} tokens a round over {read.blocks} blocks; survival by position {shape}"
    if late > 0.2 and late > 2 * read.survival[0]:
        text = (
            f"The anchor is read wrongly: drafts fit one place earlier ({100 * late:.0f}% do), while position 0 fits in"
            f" {100 * read.survival[0]:.0f}%; the block has a row more than it drafts."
        )
        yield Finding(
            "acceptance",
            "failure",
            text,
            "set sample_from_anchor to false",
            everywhere("worse", "its anchor is read wrongly"),
        )
    elif best and others[best] > CLEAR:
        text = (
            f"The tapped layers are off by one: with each moved by {best:+d} the draft gives {found[best].accepted:.2f}"
            f" tokens a round instead of {read.accepted:.2f}, and the target's words are likelier by"
            f" {others[best]:.0f} standard errors."
        )
        yield Finding(
            "acceptance",
            "failure",
            text,
            f"add {best} to each tapped layer",
            everywhere("worse", "its tapped layers are off by one"),
        )
    elif read.accepted < WEAK:
        text = f"The head is weak, or was trained on other text: {measured}; no other reading is clearly better."
        effects = {"torch": Effect("runs", text)}
        yield Finding("acceptance", "warning", text, "train it further", effects)
    else:
        alike = ", ".join(f"{shift:+d}" for shift, z in others.items() if z > -SAME)
        doubt = f" Taps moved by {alike} draft as well, so this cannot tell how they are counted." if alike else ""
        yield Finding("acceptance", "ok", f"Drafts agree with the target: {measured}.{doubt}")
