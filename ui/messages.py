"""The messages in which a run reaches the page, a recording and an export: JSON objects, one a line.

    {"type": "run", "version": 1, ...}      what runs, once and first; RUN_FIELDS, null where unknown
    {"type": "state", "state", "lane", "text", "position", "fraction"}      progress, one of STATES
    {"type": "round", "lane", "round", "pieces", "ghosts"}      a Round, and its committed and drafted tokens' texts
    {"type": "verdict", "identical", "first_difference", "speedup", "reason"}      once and last

A lane's text is the concatenation of its pieces. A token that completes no character has the piece "", and the token
that completes it has the whole character. Who reads ignores types and fields that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

from sglang_dspark.decoding.rounds import Round, decode_rounds, summarise, survival_by_position

Lane = Literal["plain", "dspark"]
State = Literal["queued", "downloading", "loading", "compiling", "running", "finished", "cancelled", "error"]
Message = dict[str, Any]

VERSION = 1
LANES: tuple[Lane, ...] = ("plain", "dspark")
STATES: tuple[State, ...] = (
    "queued",
    "downloading",
    "loading",
    "compiling",
    "running",
    "finished",
    "cancelled",
    "error",
)
RUN_TEXTS = ("id", "title", "prompt", "pair", "engine", "device", "dtype", "machine", "schedule")
RUN_NUMBERS = ("threads", "block", "max_new_tokens")
RUN_FIELDS = (*RUN_TEXTS, *RUN_NUMBERS, "sampling", "memory", "lanes")
GHOST_CONTEXT = 8
"""Committed tokens before a draft that its texts are decoded after; spaces and characters may depend on them."""
CONFIDENCE_BINS = 10


class Pieces(Protocol):
    """An incremental detokeniser: `local_runner.engine.TextStream`."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete."""


class LaneWriter:
    """Turns the rounds of one lane into messages. It costs no time that rounds measure if it is called between them."""

    def __init__(self, lane: Lane, stream: Pieces, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """`stream` is a fresh detokeniser; `decode` gives the text of tokens, ids stand for them where it is None."""
        self.lane = lane
        self.text = ""
        self._stream = stream
        self._decode = decode
        self._recent: tuple[int, ...] = ()

    def message(self, round_: Round) -> Message:
        """The message of the lane's next round."""
        ghosts = self._ghosts(round_.drafted)
        pieces = [self._stream.push([token]) for token in round_.committed]
        self.text += "".join(pieces)
        self._recent = (*self._recent, *round_.committed)[-GHOST_CONTEXT:]
        return round_message(self.lane, round_, pieces, ghosts)

    def _ghosts(self, drafted: Sequence[int]) -> list[str]:
        if self._decode is None:
            return [f" {token}" for token in drafted]
        ghosts = []
        seen = self._decode(self._recent)
        for k in range(len(drafted)):
            text = self._decode((*self._recent, *drafted[: k + 1]))
            whole = not text.endswith("\ufffd")
            ghosts.append(text[len(seen) :] if whole else "")
            seen = text if whole else seen
        return ghosts


def run_message(**known: Any) -> Message:
    """The first message of a run; what is not `known` is null. Raises TypeError for a field that there is not."""
    if unknown := set(known) - set(RUN_FIELDS):
        raise TypeError(f"a run has no {', '.join(sorted(unknown))}")
    fields = dict.fromkeys(RUN_FIELDS) | {"lanes": list(LANES)} | known
    return {"type": "run", "version": VERSION, **fields}


def state_message(
    state: State,
    *,
    lane: Lane | None = None,
    text: str = "",
    position: int | None = None,
    fraction: float | None = None,
) -> Message:
    """Where a run, or one lane of it, is; `position` in the queue counts from 1, `fraction` of progress is 0 to 1."""
    return {"type": "state", "state": state, "lane": lane, "text": text, "position": position, "fraction": fraction}


def round_message(lane: Lane, round_: Round, pieces: Sequence[str], ghosts: Sequence[str]) -> Message:
    """One round: a piece for each committed token, a ghost for each drafted one."""
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(round_).items()}
    return {"type": "round", "lane": lane, "round": fields, "pieces": list(pieces), "ghosts": list(ghosts)}


def verdict_message(
    identical: bool | None,
    speedup: float | None,
    reason: str = "",
    first_difference: dict[str, Any] | None = None,
) -> Message:
    """How the race ended. `speedup` is DSpark's tokens per second over plain decoding's, `reason` one sentence on it.

    `first_difference` has `position` (of the answer's tokens, from 0), `margin` and `noise` in logits (null if not
    measured) and whether it is `numerics`, a near-tie within arithmetic noise.
    """
    return {
        "type": "verdict",
        "identical": identical,
        "first_difference": first_difference,
        "speedup": speedup,
        "reason": reason,
    }


def lane_rounds(messages: Iterable[Message], lane: Lane) -> list[Round]:
    """The rounds of one lane, in order."""
    return [Round.from_dict(m["round"]) for m in messages if m.get("type") == "round" and m["lane"] == lane]


def lane_text(messages: Iterable[Message], lane: Lane) -> str:
    """The text of one lane."""
    return "".join(p for m in messages if m.get("type") == "round" and m["lane"] == lane for p in m["pieces"])


def statistics(rounds: Sequence[Round], block: int) -> dict[str, Any]:
    """What the page shows of one lane, computed here: `summarise`, survival by position, and reliability."""
    return {
        **asdict(summarise(rounds)),
        "survival": survival_by_position(rounds, block),
        "reliability": reliability(rounds),
    }


def reliability(rounds: Iterable[Round]) -> list[dict[str, float]]:
    """Confidence against outcome, in bins of equal width that are not empty.

    Counted are the verified tokens whose predecessors in the block were all accepted, because that is the condition
    under which a confidence is a probability of survival. A bin has their `count`, mean `confidence`, and the share
    that was `accepted`.
    """
    count, sure, kept = [0] * CONFIDENCE_BINS, [0.0] * CONFIDENCE_BINS, [0] * CONFIDENCE_BINS
    for r in decode_rounds(rounds):
        for k in range(min(r.scheduled, r.accepted + 1, len(r.confidence))):
            at = min(int(r.confidence[k] * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)
            count[at] += 1
            sure[at] += r.confidence[k]
            kept[at] += r.accepted > k
    return [{"count": n, "confidence": sure[i] / n, "accepted": kept[i] / n} for i, n in enumerate(count) if n]
