"""The verdict on identity: whether DSpark committed the tokens that plain decoding commits, and if not, why.

Decoding γ + 1 rows at once is not bit for bit the arithmetic of decoding one. Where the target's two best tokens are
nearer to each other than that noise, either may win, and a difference between those two is `numerics`. Every other one
is a `failure`. With temperature or penalties the two best logits explain nothing; there a difference is a failure if
the noise is negligible, and `undecided` if it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from local_runner.engine import Decoding, Engine
from local_runner.race import Run

Verdict = Literal["identical", "numerics", "undecided", "failure", "not comparable"]

NEGLIGIBLE_NOISE = 1e-3
"""Width noise in logits below which sampled streams must not part (float32 is two orders below, bfloat16 above)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers part: `position` counts the answer's tokens from 0; None stands for an answer that has ended.

    `margin` is the lead, in logits, of the target's best token over its second best there.
    """

    prompt: str
    position: int
    plain: int | None
    dspark: int | None
    margin: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Identity:
    """The verdict on a race; `width_noise` is in logits, None where it had not to be measured."""

    verdict: Verdict
    compared: int
    differences: tuple[Difference, ...]
    width_noise: float | None

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.verdict == "not comparable":
            return "Not comparable token by token: sampled drafts draw other random numbers than plain decoding does."
        if self.verdict == "identical":
            return f"Identical: all {self.compared} tokens are those of plain decoding."
        first = next(d for d in self.differences if d.verdict == self.verdict)
        where = (
            f"{len(self.differences)} of the answers part from plain decoding, the first at {first.prompt}, token"
            f" {first.position}, where the target's two best tokens are {first.margin:.4g} apart and arithmetic noise"
            f" between widths is {self.width_noise:.4g}"
        )
        return {
            "numerics": f"Numerics: {where}; every difference is such a near-tie.",
            "undecided": f"Undecided: {where}; repeat with --dtype float32, where noise cannot explain a difference.",
            "failure": f"FAILURE: {where}, which does not explain it.",
        }[self.verdict]


def first_difference(plain: Sequence[int], dspark: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """Where the answers first differ, with both tokens there (None past an end); None if they agree."""
    for position, (a, b) in enumerate(zip_longest(plain, dspark)):
        if a != b:
            return position, a, b
    return None


def judge(engine: Engine, runs: Sequence[Run], decoding: Decoding) -> Identity:
    """Compare each plain run with the DSpark run beside it, and measure margins and noise where they part."""
    if not decoding.sampling.greedy and decoding.draft_style == "sampled":
        return Identity("not comparable", 0, (), None)
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    found = {(p.heat.name, d): p for p, q in pairs if (d := first_difference(p.tokens, q.tokens))}
    compared = sum(len(p.tokens) for p, _ in pairs)
    if not found:
        return Identity("identical", compared, (), None)
    contexts = [run.heat.prompt_ids + run.tokens[:position] for (_, (position, _, _)), run in found.items()]
    noise = max((engine.width_noise(ids) for ids in contexts if len(ids) > 1), default=0.0)
    differences = []
    for (name, (position, a, b)), run in found.items():
        best, second, margin = engine.margin(run.heat.prompt_ids, run.tokens[:position])
        verdict: Verdict
        if decoding.sampling.plain_greedy:
            verdict = "numerics" if {a, b} == {best, second} and margin <= noise else "failure"
        elif a is None or b is None:
            verdict = "failure"
        else:
            verdict = "failure" if noise < NEGLIGIBLE_NOISE else "undecided"
        differences.append(Difference(name, position, a, b, margin, verdict))
    order: tuple[Verdict, ...] = ("failure", "undecided", "numerics")
    worst = next(v for v in order if any(d.verdict == v for d in differences))
    return Identity(worst, compared, tuple(differences), noise)
