"""Whether to draft, with what, and how much of it to verify: by measured costs and by what was accepted so far.

A round that verifies k drafted tokens commits 1 + Σ_{j≤k} a_j tokens in expectation, a_j being the survival of draft j.
`Policy` takes what promises most tokens per second: a head's block, a look-up's, or none. It stays lossless as the
rules of `schedule` do: what it knows of a block before it admits token k are the confidences of tokens 1..k, and
everything else comes from rounds that are over.

Speculating may lose a bound, 2 % of plain decoding's time. Half of that is there from the start, for an answer of
`LONG` tokens, and half is earned token by token. A round spends what it takes longer than plain decoding takes for the
same tokens, and none drafts unless the most that it can lose is there. So whatever a head does, N ≥ LONG tokens take at
most 1 + bound of plain decoding's time. A parked head is probed once in I rounds,

    I = L / (½ · bound · plain - (parked - plain)),

where L is the most that a probe loses and the denominator what a parked round leaves for it. A probe that gained pays
for the next one, which follows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from sglang_dspark.decoding.schedule import CostCurve
from sglang_dspark.errors import InputError

Source = Literal["plain", "head", "lookup"]

BOUND = 0.02
LONG = 1000
PRIOR = 4.0
"""Observations that a guess counts for."""
MEMORY = 0.985
"""What an observation still counts for after the next one of its kind: about seventy count."""
BINS = 5
"""Of a head's confidences."""
FIRST_BLOCKS = 8
"""Blocks of a new head that are verified whole before it is judged."""
SAVED = 10
"""How many times the start may be saved of gains: enough to outlive bad luck, too little to pay for old merits."""
WHOLE_EVERY = 32
"""One block in so many is verified whole, so that positions behind the usual prefix are seen too."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of whole rounds, overhead included.

    `plain_s` is plain decoding's, without a draft model anywhere; `parked_s` that of a round which drafts nothing but
    lets the head follow the text. `curve` holds rounds that verify 1.. rows, and the draft before them.
    """

    plain_s: float
    parked_s: float
    curve: CostCurve

    def __post_init__(self) -> None:
        if not all(math.isfinite(s) and s > 0 for s in (self.plain_s, self.parked_s)):
            raise InputError(f"A round must take time, but 'plain_s' is {self.plain_s}, 'parked_s' {self.parked_s}.")

    def round_s(self, source: Source, drafts: int, following: bool) -> float:
        """Seconds of a round that verifies `drafts` tokens of `source`, with a head that is `following` or none."""
        if source == "head":
            return self.curve.draft_s + self.curve.verify_s(drafts + 1)
        base = self.parked_s if following else self.plain_s
        return base + max(0.0, self.curve.verify_s(drafts + 1) - self.curve.verify_s(1))


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The schedule that leaves both source and length to the `Policy` of an engine that has one."""

    uses_confidence = False

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        """Raises InputError: an engine without a policy cannot decode with it."""
        raise InputError("The schedule 'adaptive' needs an engine that measures; use fixed, threshold:T or algorithm1.")

    def __str__(self) -> str:
        return "adaptive"


class Survivals:
    """How often drafts of each of `cells` kinds survived once those before them did: decayed counts, over a guess."""

    def __init__(self, cells: int) -> None:
        self._tried, self._right = [0.0] * cells, [0.0] * cells

    def __len__(self) -> int:
        return len(self._tried)

    def mean(self, cell: int, guess: float) -> float:
        """The mean of a Beta distribution that began as `PRIOR` observations of `guess`."""
        return (PRIOR * guess + self._right[cell]) / (PRIOR + self._tried[cell])

    def chain(self, guess: float) -> list[float]:
        """The means of all cells, `guess` being the first's prior and each one's mean the next one's."""
        means: list[float] = []
        for cell in range(len(self._tried)):
            means.append(self.mean(cell, means[-1] if means else guess))
        return means

    def saw(self, cell: int, survived: bool) -> None:
        """Count one that was verified while those before it survived."""
        self._tried[cell] = MEMORY * self._tried[cell] + 1
        self._right[cell] = MEMORY * self._right[cell] + survived


def admitted(survives: Sequence[float], typical: Sequence[float], seconds: Sequence[float]) -> int:
    """How many drafts to verify for the most tokens per second.

    `survives[k]` is the chance of draft k given those before it, `typical[k]` what it usually is, and `seconds[k]` the
    cost of a round that verifies k. Draft k is admitted if going on with it promises more than stopping before it does,
    where what comes behind it is taken to be typical. With costs in a straight line that is Algorithm 1. Where the
    second row is dear and the next ones are cheap, Algorithm 1 would stop at the first fall, before the rise.
    """
    tokens, a = 1.0, 1.0
    for k, chance in enumerate(survives):
        stopping = tokens / seconds[k]
        a *= chance
        tokens += a
        going_on, ahead, then = tokens / seconds[k + 1], a, tokens
        for j in range(k + 1, len(survives)):
            ahead *= typical[j]
            then += ahead
            going_on = max(going_on, then / seconds[j + 1])
        if not going_on > stopping:
            return k
    return len(survives)


def expected(survives: Sequence[float]) -> float:
    """1 + Σ a_k: the tokens that a round commits which verifies all of these."""
    return 1.0 + sum(math.prod(survives[: k + 1]) for k in range(len(survives)))


class Chooser(Protocol):
    """What a drafter asks: before a round where to draft, then how much to verify; and tells: what was accepted."""

    following: bool
    """Whether the head still has to follow the text of this request."""

    def choose(self, matches: Sequence[int]) -> Source:
        """Where this round's drafts come from. `matches[k]` says how many tokens found the k-th look-up draft."""

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        """How many of the `drafted` tokens to verify."""

    def observe(self, scheduled: int, accepted: int) -> None:
        """The round is over: `accepted` of `scheduled` tokens survived."""

    def compared(self, matches: Sequence[int], right: int) -> None:
        """Of look-up drafts found by `matches` the first `right` came true, and the next, if there is one, did not."""


class Policy:
    """A `Chooser` by costs and observed survival. Knows requests only as rounds; what it learnt outlives them."""

    def __init__(self, costs: Costs, block: int, *, head: bool, longest: int, bound: float = BOUND) -> None:
        """`block` is γ, `head` whether there is a draft model, `longest` the most tokens that find a look-up draft."""
        self.costs, self.block, self.head, self.bound = costs, block, head, bound
        self.following = head
        """Whether the head follows the present request's text."""
        self._cells, self._typical = Survivals(block * BINS), Survivals(block)
        self._lookups = Survivals(longest + block)
        self._promise = _Rate()
        self._earned = bound / 2 * costs.plain_s
        self._worst = max(0.0, costs.round_s("head", block, True) - costs.plain_s) if head else 0.0
        self._spare = self._earned - (costs.parked_s - costs.plain_s)
        self.interval = self._worst / self._spare if self._spare > 0 else math.inf
        """Rounds from one probe of a parked head to the next."""
        self._start = max(LONG * self._earned, self._worst)
        self.credit = self._start
        """Seconds that speculation may lose yet."""
        self._source: Source = "plain"
        self._probing = self._won = False
        self._waited = self._blocks = 0
        self._planned = 0
        self._confidence: tuple[float, ...] = ()

    def begin(self) -> bool:
        """A request begins; whether its head follows: always, unless even that costs more than is earned."""
        self.following = self.head and (self._spare > 0 or self.credit >= self._start / 2)
        return self.following

    @property
    def parked(self) -> bool:
        """Whether the head promises less than no head does."""
        return self.head and self._head_rate() <= 1 / self._seconds("plain")

    def choose(self, matches: Sequence[int]) -> Source:
        """As `Chooser.choose`."""
        self.following = self.following and self.credit >= 0
        plain = 1 / self._seconds("plain")
        self._probing = False
        rates: dict[Source, float] = {}
        chances = self._looked_up(matches)
        self._planned = admitted(chances, chances, [self._seconds("lookup", k) for k in range(len(chances) + 1)])
        if self._planned:
            rates["lookup"] = expected(chances[: self._planned]) / self._seconds("lookup", self._planned)
        if self.following:
            rates["head"] = self._head_rate()
        better: list[Source] = sorted((s for s in rates if rates[s] > plain), key=lambda s: -rates[s])
        self._source = next((s for s in better if self._affordable(s)), "plain")
        self._waited += 1
        due = self._won or self._waited >= self.interval
        if self._source == "plain" and self.following and due and self._affordable("head"):
            self._source, self._probing = "head", True
        if self._source == "head":
            self._waited = 0
        return self._source

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        """As `Chooser.length`; `confidence` is empty for a draft without a confidence head."""
        if self._source != "head":
            return min(self._planned, drafted)
        self._confidence = tuple(confidence[:drafted])
        typical = self._typical.chain(0.5)[:drafted]
        chances = [self._cells.mean(self._cell(k), self._guess(k, typical)) for k in range(drafted)]
        planned = admitted(chances, typical, [self._seconds("head", k) for k in range(drafted + 1)])
        self._promise.add(expected(chances[:planned]), self._seconds("head", planned))
        self._blocks += 1
        whole = self._probing or self._blocks <= FIRST_BLOCKS or self._blocks % WHOLE_EVERY == 0
        return drafted if whole else planned

    def observe(self, scheduled: int, accepted: int) -> None:
        """As `Chooser.observe`."""
        spent = self._seconds(self._source, scheduled)
        gained = self.costs.plain_s * (accepted + 1) - spent
        if self._source == "head":
            self._won = gained > 0
            for k in range(min(scheduled, accepted + 1)):
                self._cells.saw(self._cell(k), accepted > k)
                self._typical.saw(k, accepted > k)
        self.credit = min(SAVED * self._start, self.credit + gained + self._earned * (accepted + 1))

    def compared(self, matches: Sequence[int], right: int) -> None:
        """As `Chooser.compared`."""
        for k, matched in enumerate(matches[: right + 1]):
            self._lookups.saw(self._match_cell(matched), right > k)

    def _seconds(self, source: Source, drafts: int = 0) -> float:
        return self.costs.round_s(source, drafts, self.following)

    def _affordable(self, source: Source) -> bool:
        drafts = self.block if source == "head" else self._planned
        return self.credit >= self._seconds(source, drafts) - self.costs.plain_s

    def _head_rate(self) -> float:
        """Tokens per second that blocks of late promised once they were there; a new head has yet to be tried."""
        return math.inf if self._blocks < FIRST_BLOCKS else self._promise.mean

    def _cell(self, k: int) -> int:
        return k * BINS + (min(int(self._confidence[k] * BINS), BINS - 1) if self._confidence else 0)

    def _guess(self, k: int, typical: Sequence[float]) -> float:
        return self._confidence[k] if self._confidence else typical[k]

    def _looked_up(self, matches: Sequence[int]) -> list[float]:
        means = self._lookups.chain(0.25)
        return [means[self._match_cell(m)] for m in matches]

    def _match_cell(self, matched: int) -> int:
        return min(matched, len(self._lookups)) - 1


class _Rate:
    """Tokens over seconds, both decayed."""

    DECAY = 0.97

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self._tokens = self.DECAY * self._tokens + tokens
        self._seconds = self.DECAY * self._seconds + seconds

    @property
    def mean(self) -> float:
        return self._tokens / self._seconds
