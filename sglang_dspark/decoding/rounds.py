"""The Round event, in which every engine, command and page speaks, and the metrics that are functions of rounds.

One request is a list of rounds. The first is the prefill: nothing drafted, and the first new token is its
`next_token`. From then on each round starts at an anchor, the last committed token, and commits at least one token
more. The tokens of an answer are the concatenation of `committed` over its rounds, and the time to its first token is
the first round's time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sglang_dspark.errors import InputError

STOPS = ("eos", "stop_string", "length", "context", "cancelled")


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of draft, schedule, verify.

    Positions count tokens of the request from 0. `anchor` is the token at `position`; `drafted[i]` proposes the token
    at `position + 1 + i`; `confidence[i]` is the modelled probability that `drafted[i]` survives given that those
    before it did (empty without a confidence head). `scheduled` of the drafted tokens were verified, `accepted` of
    those survived, and `next_token` is the correction or bonus that follows them. `committed` is `drafted[:accepted] +
    (next_token,)`, cut where the answer stopped. Times are seconds of wall clock.
    """

    request: str
    index: int
    position: int
    anchor: int
    drafted: tuple[int, ...]
    confidence: tuple[float, ...]
    scheduled: int
    accepted: int
    next_token: int
    committed: tuple[int, ...]
    stop: str | None
    draft_s: float
    verify_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.scheduled <= len(self.drafted):
            raise ValueError(
                f"round {self.index} needs 0 <= accepted ({self.accepted}) <= scheduled ({self.scheduled})"
                f" <= drafted ({len(self.drafted)})"
            )
        if len(self.confidence) not in (0, len(self.drafted)):
            raise ValueError(
                f"round {self.index} has {len(self.confidence)} confidences for {len(self.drafted)} drafted tokens"
            )
        full = (*self.drafted[: self.accepted], self.next_token)
        if self.committed != full[: len(self.committed)] or (self.stop is None and self.committed != full):
            raise ValueError(
                f"round {self.index} commits {self.committed}, which is not the accepted prefix and next token"
            )
        if self.stop is not None and self.stop not in STOPS:
            raise ValueError(f"round {self.index} stops for '{self.stop}', which is none of {', '.join(STOPS)}")

    def to_json(self) -> str:
        """One line of JSON with the fields of this class."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Round:
        """The inverse of `to_json`. Raises InputError that names what is missing or malformed."""
        names = [f.name for f in fields(cls)]
        missing = [n for n in names if n not in data]
        if missing:
            raise InputError(f"A round lacks {', '.join(missing)}; it needs the fields {', '.join(names)}.")
        values = {n: data[n] for n in names}
        for name in ("drafted", "confidence", "committed"):
            if not isinstance(values[name], list):
                raise InputError(f"A round's '{name}' must be a list, not {type(values[name]).__name__}.")
            values[name] = tuple(values[name])
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise InputError(f"A round is inconsistent: {error}.") from error


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics over rounds, named as the field names them. Rates are None where nothing was drafted."""

    tokens: int
    rounds: int
    drafted: int
    scheduled: int
    accepted: int
    mean_accepted_length: float | None
    draft_acceptance_rate: float | None
    ttft_s: float
    seconds: float
    tokens_per_s: float


def decode_rounds(rounds: Iterable[Round]) -> list[Round]:
    """The rounds that follow a request's prefill (index > 0)."""
    return [r for r in rounds if r.index > 0]


def summarise(rounds: Sequence[Round]) -> Summary:
    """Summarise one or several requests.

    The mean accepted length τ counts the bonus or correction token, as the paper does: tokens committed after prefill,
    before any cut at a stop, per decoding round. `tokens_per_s` covers decoding only: tokens after each prefill over
    the seconds of the rounds that made them.
    """
    after = decode_rounds(rounds)
    seconds = sum(r.draft_s + r.verify_s for r in after)
    prefill = [r.draft_s + r.verify_s for r in rounds if r.index == 0]
    scheduled = sum(r.scheduled for r in after)
    accepted = sum(r.accepted for r in after)
    committed = sum(len(r.committed) for r in after)
    return Summary(
        tokens=sum(len(r.committed) for r in rounds),
        rounds=len(after),
        drafted=sum(len(r.drafted) for r in after),
        scheduled=scheduled,
        accepted=accepted,
        mean_accepted_length=sum(r.accepted + 1 for r in after) / len(after) if after else None,
        draft_acceptance_rate=accepted / scheduled if scheduled else None,
        ttft_s=sum(prefill) / len(prefill) if prefill else 0.0,
        seconds=seconds,
        tokens_per_s=committed / seconds if seconds > 0 else 0.0,
    )


def survival_by_position(rounds: Iterable[Round], block: int) -> list[float | None]:
    """Survival: of the rounds that scheduled position k (1-based), the share in which positions 1..k were all
    accepted.
    """
    return _share(rounds, block, conditional=False)


def conditional_by_position(rounds: Iterable[Round], block: int) -> list[float | None]:
    """Conditional acceptance: of the rounds that scheduled k and accepted 1..k-1, the share that also accepted k."""
    return _share(rounds, block, conditional=True)


def _share(rounds: Iterable[Round], block: int, *, conditional: bool) -> list[float | None]:
    tried, kept = [0] * block, [0] * block
    for r in rounds:
        for k in range(min(r.scheduled, block)):
            if conditional and r.accepted < k:
                break
            tried[k] += 1
            kept[k] += r.accepted > k
    return [kept[k] / tried[k] if tried[k] else None for k in range(block)]
