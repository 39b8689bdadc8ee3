"""The race: the same prompts decoded plainly and with DSpark, by one engine, interleaved prompt by prompt.

Which of the two goes first alternates, so that neither profits from warm caches or a cooler processor. Time is the time
of the rounds: what watches the race runs between them and costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

from local_runner.engine import Decoding, Engine, Message, Mode, encode
from local_runner.files import whole_file
from local_runner.prompts import Prompt
from sglang_dspark.decoding.rounds import Round

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Heat:
    """One answer to be decoded: the `number`-th of `total` conversations, its turn, its mode and repeat, all from 0."""

    prompt: Prompt
    number: int
    total: int
    turn: int
    repeat: int
    mode: Mode
    prompt_ids: tuple[int, ...]

    @property
    def question(self) -> str:
        """What the user said, or how many token ids there are where nobody said anything."""
        return self.prompt.turns[self.turn] if self.prompt.turns else f"{len(self.prompt_ids)} token ids"

    @property
    def name(self) -> str:
        """The prompt's id, with the turn from the second one on."""
        return self.prompt.id if self.turn == 0 else f"{self.prompt.id}#{self.turn + 1}"


@dataclass(frozen=True, slots=True)
class Run:
    """A heat that was decoded: its rounds, and `wall_s` seconds of wall clock from request to last round."""

    heat: Heat
    rounds: tuple[Round, ...]
    wall_s: float

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer."""
        return tuple(t for r in self.rounds for t in r.committed)


class Watcher(Protocol):
    """Whoever follows a race; called between rounds, outside what is timed."""

    def begin(self, heat: Heat) -> None:
        """A heat starts."""

    def round(self, heat: Heat, round_: Round) -> None:
        """A round of it is done."""

    def end(self, run: Run) -> None:
        """It is over."""


def race(
    engine: Engine,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    *,
    repeats: int,
    watcher: Watcher,
    cancelled: threading.Event,
) -> list[Run]:
    """Decode every prompt in both modes, `repeats` times over; return the runs, each plain one beside its DSpark one.

    Later turns of a conversation follow the plain answers, so that both modes always answer the same prompt. When
    `cancelled` is set the race ends, and runs that are not complete in both modes are left out.
    """
    runs: list[Run] = []
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            messages: list[Message] = []
            for turn in range(max(1, len(prompt.turns))):
                ids = prompt.ids
                if not ids:
                    messages.append({"role": "user", "content": prompt.turns[turn]})
                    ids = encode(engine, messages)
                modes: tuple[Mode, Mode] = ("plain", "dspark") if (number + repeat) % 2 == 0 else ("dspark", "plain")
                pair: dict[Mode, Run] = {}
                for mode in modes:
                    heat = Heat(prompt, number, len(prompts), turn, repeat, mode, ids)
                    pair[mode] = _run(engine, heat, decoding, watcher, cancelled)
                    if cancelled.is_set():
                        return runs
                runs += [pair["plain"], pair["dspark"]]
                if turn + 1 < len(prompt.turns):
                    messages.append({"role": "assistant", "content": engine.decode(pair["plain"].tokens)})
    return runs


def warm_up(engine: Engine, prompt: Prompt, decoding: Decoding, cancelled: threading.Event) -> None:
    """Decode a few tokens in both modes, so that no first call is timed."""
    ids = prompt.ids or encode(engine, [{"role": "user", "content": prompt.turns[0]}])
    modes: tuple[Mode, Mode] = ("plain", "dspark")
    for mode in modes:
        made = 0
        for round_ in engine.generate(decoding.request(engine, ids, mode, "warm-up"), cancelled):
            made += len(round_.committed)
            if made >= WARM_UP_TOKENS:
                break


def record(runs: Sequence[Run], folder: Path) -> None:
    """Write each run as `PROMPT.MODE.REPEAT.jsonl` in `folder`, one Round a line. Raises InputError if that fails."""
    for run in runs:
        safe = "".join(c if c.isalnum() or c in "-_#" else "_" for c in run.heat.name)
        with whole_file(folder / f"{safe}.{run.heat.mode}.{run.heat.repeat}.jsonl") as stream:
            stream.writelines(r.to_json() + "\n" for r in run.rounds)


def _run(engine: Engine, heat: Heat, decoding: Decoding, watcher: Watcher, cancelled: threading.Event) -> Run:
    watcher.begin(heat)
    request = decoding.request(engine, heat.prompt_ids, heat.mode, f"{heat.name}/{heat.mode}/{heat.repeat}")
    rounds: list[Round] = []
    wall = 0.0
    started = perf_counter()
    for round_ in engine.generate(request, cancelled):
        wall += perf_counter() - started
        rounds.append(round_)
        watcher.round(heat, round_)
        started = perf_counter()
    run = Run(heat, tuple(rounds), wall + perf_counter() - started)
    watcher.end(run)
    return run
