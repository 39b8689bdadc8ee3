"""How much of a drafted block is worth verifying: a fixed length, a confidence threshold, or the paper's Algorithm 1.

Every rule here decides about draft token k from the confidences of tokens 1..k only. The confidence of token k is read
before token k is drawn (it sees the hidden state of row k and token k-1), so no rule looks at the token that it admits,
nor at any later one. That is what keeps scheduling lossless when drafts are sampled.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, Protocol

from sglang_dspark.errors import InputError


class Schedule(Protocol):
    """Says how many tokens of a drafted block to verify."""

    @property
    def uses_confidence(self) -> bool:
        """Whether the schedule says anything only for a draft with a confidence head."""

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        """How many of the `drafted` tokens to verify.

        `confidence` holds a probability for each of them, or nothing where the draft has no confidence head.
        """


@dataclass(frozen=True, slots=True)
class Fixed:
    """The first `count` tokens of every block, or the whole block."""

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 0:
            raise InputError(f"The schedule 'fixed:{self.count}' needs a number of tokens of at least 0.")

    uses_confidence = False

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        return drafted if self.count is None else min(self.count, drafted)

    def __str__(self) -> str:
        return "fixed" if self.count is None else f"fixed:{self.count}"


@dataclass(frozen=True, slots=True)
class Threshold:
    """The tokens before the first whose confidence is below `threshold`; all at 0, or where there is no confidence."""

    threshold: float

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise InputError(f"The schedule 'threshold:{self.threshold}' needs a probability between 0 and 1.")

    @property
    def uses_confidence(self) -> bool:
        return self.threshold > 0

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        return next((k for k, c in enumerate(confidence[:drafted]) if c < self.threshold), drafted)

    def __str__(self) -> str:
        return f"threshold:{self.threshold}"


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a step costs: `seconds[i]` to verify a batch of `rows[i]` rows, and `draft_s` to draft before it.

    Measured points are joined by straight lines; beyond the last one the last line goes on. More rows never cost less:
    a point that was measured below an earlier one is raised to it. Raises InputError unless there are at least two
    points, rows rise from at least 1, and times are positive.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_s: float = 0.0

    def __post_init__(self) -> None:
        rows, seconds = tuple(self.rows), tuple(self.seconds)
        if len(rows) != len(seconds) or len(rows) < 2:
            raise InputError(
                f"A cost curve needs at least two points, but has {len(rows)} row counts and {len(seconds)} times."
            )
        if rows[0] < 1 or any(b <= a for a, b in pairwise(rows)):
            raise InputError(f"A cost curve's 'rows' must rise from at least 1, but are {list(rows)}.")
        if not all(math.isfinite(s) and s > 0 for s in seconds):
            raise InputError(f"A cost curve's 'seconds' must be positive numbers, but are {list(seconds)}.")
        if not (math.isfinite(self.draft_s) and self.draft_s >= 0):
            raise InputError(f"A cost curve's 'draft_s' must be a number of at least 0, but is {self.draft_s}.")
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "seconds", tuple(accumulate(seconds, max)))

    def verify_s(self, rows: int) -> float:
        """Seconds to verify a batch of `rows` rows; the first point's below the first point."""
        if rows <= self.rows[0]:
            return self.seconds[0]
        right = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        (x0, x1), (y0, y1) = self.rows[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)

    def steps_per_second(self, rows: int) -> float:
        """SPS(B) of the paper, of a step that drafts and then verifies `rows` rows."""
        return 1.0 / (self.draft_s + self.verify_s(rows))

    def to_json(self) -> str:
        """One line of JSON with the fields of this class."""
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CostCurve:
        """The inverse of `to_json`. Raises InputError that says what is missing or malformed."""
        if not isinstance(data.get("rows"), list) or not isinstance(data.get("seconds"), list):
            raise InputError("A cost curve needs the lists 'rows' and 'seconds', and may have the number 'draft_s'.")
        try:
            return cls(
                tuple(int(r) for r in data["rows"]),
                tuple(float(s) for s in data["seconds"]),
                float(data.get("draft_s", 0.0)),
            )
        except (TypeError, ValueError) as error:
            raise InputError(f"A cost curve holds something that is not a number: {error}.") from error


@dataclass(frozen=True, slots=True)
class Algorithm1:
    """As many tokens as raise the expected tokens per second, by the paper's Algorithm 1 for one request.

    `curve` is None until the engine has measured one; a block cannot be scheduled before that.
    """

    curve: CostCurve | None = None

    uses_confidence = True

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        """As `Schedule.length`. Raises InputError without a confidence for each token or without a cost curve."""
        if len(confidence) < drafted:
            raise InputError(
                f"The schedule 'algorithm1' needs {drafted} confidences, but the draft gave {len(confidence)};"
                " use a draft with a confidence head, or the schedule 'fixed'."
            )
        if self.curve is None:
            raise InputError("The schedule 'algorithm1' needs a measured cost curve; measure one, or use 'fixed'.")
        return algorithm1([survival(confidence[:drafted])], self.curve.steps_per_second)[0]

    def __str__(self) -> str:
        return "algorithm1"


def parse_schedule(text: str) -> Schedule:
    """The schedule that `text` names: `fixed`, `fixed:K`, `threshold:T` or `algorithm1`. Raises InputError if none."""
    name, colon, argument = text.partition(":")
    try:
        if name == "fixed":
            return Fixed(int(argument) if colon else None)
        if name == "threshold" and colon:
            return Threshold(float(argument))
    except ValueError:
        raise InputError(f"The schedule '{text}' needs a number after its colon.") from None
    if text == "algorithm1":
        return Algorithm1()
    raise InputError(f"'{text}' is no schedule; use fixed, fixed:K, threshold:T or algorithm1.")


def survival(confidence: Iterable[float]) -> list[float]:
    """a_k = Π_{i≤k} c_i: the modelled probability that the first k tokens are all accepted."""
    return list(accumulate(confidence, mul))


def algorithm1(survivals: Sequence[Sequence[float]], steps_per_second: Callable[[int], float]) -> list[int]:
    """How many tokens to verify of each request: the paper's Algorithm 1.

    `survivals[r][j]` is a_{r,j+1}, which must not rise along j; `steps_per_second(B)` is the step rate at a batch of B
    rows. All (r, j) are taken by falling survival, a request's own tokens in their order and ties by position, then by
    request. One after the other is admitted while Θ = τ·SPS(B) rises, with τ = R + Σ a and B = R + admitted, and the
    first that does not raise Θ ends it. Looking past it for a later rise would make a token's admission depend on those
    after it, and so on its own value: see Appendix A of the paper.
    """
    lengths = [0] * len(survivals)
    tau, batch = float(len(survivals)), len(survivals)
    theta = tau * steps_per_second(batch) if batch else 0.0
    order = sorted((-a, j, r) for r, request in enumerate(survivals) for j, a in enumerate(request))
    for negative, _, r in order:
        tau, batch = tau - negative, batch + 1
        if not tau * steps_per_second(batch) > theta:
            break
        theta = tau * steps_per_second(batch)
        lengths[r] += 1
    return lengths
