"""One answer: its text as far as it is certain, its rounds, and what to say about it afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from local_runner.board import printable
from local_runner.engine import Decoding, Engine, Mode
from sglang_dspark.decoding.rounds import Round, summarise

STOPPED = {
    "eos": "end of answer",
    "stop_string": "stop string",
    "length": "length limit",
    "context": "context full",
    "cancelled": "cancelled",
}


def write_out(piece: str) -> None:
    """Write to standard output at once; what could steer a terminal is only taken out where there is one."""
    sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. `text` is None where the target has no tokenizer."""

    text: str | None
    prompt_tokens: int
    rounds: tuple[Round, ...]

    @property
    def tokens(self) -> list[int]:
        """The answer's tokens, with the one that stopped it."""
        return [t for r in self.rounds for t in r.committed]

    @property
    def stop(self) -> str:
        """Why it ended: one of `rounds.STOPS`."""
        return (self.rounds[-1].stop if self.rounds else None) or "cancelled"

    def statistics(self) -> str:
        """One line: tokens, speed, mean accepted length, time to the first token, why it ended."""
        made = summarise(self.rounds)
        parts = [f"{made.tokens} tokens"]
        if made.tokens_per_s:
            parts.append(f"{made.tokens_per_s:.1f} tok/s")
        if made.drafted and made.mean_accepted_length is not None:
            parts.append(f"τ {made.mean_accepted_length:.2f}")
        return " · ".join([*parts, f"first token after {made.ttft_s:.2f} s", STOPPED[self.stop]])

    def to_dict(self) -> dict[str, Any]:
        """The answer for `generate --json`."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "stop": self.stop,
            "rounds": asdict(summarise(self.rounds)),
        }


class CertainText:
    """Cuts text before the first stop string, and holds back an ending that may yet become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._over = False

    def push(self, text: str) -> str:
        """What is certain after `text` has followed."""
        if self._over:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._over = True
            return self._held[: min(found)]
        keep = max((n for stop in self._stops for n in range(len(stop)) if self._held.endswith(stop[:n])), default=0)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain

    def finish(self) -> str:
        """What was held back; nothing follows, so it is no stop string."""
        return "" if self._over else self._held


def answer(
    engine: Engine,
    decoding: Decoding,
    prompt_ids: Sequence[int],
    mode: Mode,
    *,
    cancelled: threading.Event,
    write: Callable[[str], None],
    events: TextIO | None = None,
) -> Answer:
    """Decode one answer; `write` gets its text as it becomes certain, `events` one Round a line.

    A target without a tokenizer writes token ids, separated by commas. Raises InputError if the engine cannot take the
    prompt.
    """
    stream = engine.text_stream() if engine.tokenizer is not None else None
    certain = CertainText(decoding.stop_strings)
    rounds: list[Round] = []
    pieces: list[str] = []

    def put(piece: str) -> None:
        if piece:
            pieces.append(piece)
            write(piece)

    for round_ in engine.generate(decoding.request(engine, prompt_ids, mode, "0"), cancelled):
        if events is not None:
            events.write(round_.to_json() + "\n")
        if stream is not None:
            put(certain.push(stream.push(round_.committed)))
        else:
            put("," * bool(rounds) + ",".join(map(str, round_.committed)))
        rounds.append(round_)
    put(certain.finish())
    return Answer("".join(pieces) if stream is not None else None, len(prompt_ids), tuple(rounds))
