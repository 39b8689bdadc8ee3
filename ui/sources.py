"""The sources of rounds that are here: an engine of the local runner, and a recorded run.

Lanes run one after the other, because each would slow the other down; which goes first alternates from race to race.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Any

from local_runner.engine import Decoding, Engine, Mode, encode, text_stream
from local_runner.options import Settings, open_engine
from local_runner.prompts import Prompt
from local_runner.race import Heat, Run, warm_up
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError
from ui import machine, service
from ui.messages import LaneWriter, Message, run_message, statistics
from ui.verdict import of_identity, verdict
from ui.words import words

WARM_UP = Prompt("warm-up", "warm-up", turns=("Say something.",))


class Stopped(Exception):
    """The visitor does not want what is being fetched or loaded any more."""


class Local:
    """The local runner: one engine at a time, loaded when it is first asked for."""

    def __init__(self, base: Settings) -> None:
        self.base = base
        self._races = count()
        self._engine: Engine | None = None
        self._pair = ""
        self._loaded: Settings | None = None
        self._known: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Where it decodes."""
        return "local"

    def machine(self) -> dict[str, Any]:
        """What is here, and what is known of the loaded engine."""
        return {"machine": machine.here(), **self._known}

    def run(self, run: service.Run) -> None:
        """Race, answer, or load and measure."""
        ask = run.ask
        if "torch" not in sys.modules:
            run.state("loading", words(ask.language)["starting"])
        from sglang_dspark.decoding.schedule import Algorithm1

        decoding = ask.settings.decoding(suited=True)
        try:
            engine = self._open(ask.settings, run)
        except Stopped:
            return
        if run.cancelled.is_set():
            return
        engine.reuse_prefix = ask.kind == "chat"  # in a race each lane reads the whole prompt
        if engine.block:
            if "curve" not in self._known:
                run.state("loading", words(ask.language)["measuring"])
            decoding = decoding.measured(engine)
        if ask.kind == "machine" or isinstance(decoding.schedule, Algorithm1):
            self._known["curve"] = machine.measured(engine)
        if ask.kind == "machine":
            if "plan" not in self._known:
                run.state("loading", words(ask.language)["planning"])
                self._known["plan"] = machine.planned(ask.settings, engine.description.get("context_length", 4096))
            run.tell({"type": "machine", "values": self.machine()})
            return
        if ask.kind == "race" and not engine.block:
            raise InputError(words(ask.language)["needs_draft"])
        prompt_ids = encode(engine, list(ask.conversation))
        lanes: tuple[Mode, ...] = ("plain", "dspark") if next(self._races) % 2 == 0 else ("dspark", "plain")
        if ask.kind == "chat":
            lanes = ("plain",) if ask.plain or not engine.block else ("dspark",)
        run.tell(self._header(engine, run, decoding, lanes))
        runs: dict[Mode, Run] = {}
        for lane in lanes:
            run.state("running", lane=lane)
            runs[lane] = self._lane(engine, run, decoding, prompt_ids, lane)
            if run.cancelled.is_set():
                return
            run.state("finished", lane=lane)
        for lane in lanes:
            values = statistics(runs[lane].rounds, engine.block)
            run.tell({"type": "statistics", "lane": lane, "values": values})
        if ask.kind == "race":
            run.tell(self._verdict(engine, runs["plain"], runs["dspark"], decoding, ask.language))

    def _open(self, settings: Settings, run: service.Run) -> Engine:
        wanted = replace(Settings(), **{name: getattr(settings, name) for name in ENGINE_SETTINGS})
        if self._engine is not None and wanted == self._loaded:
            return self._engine
        # The old engine goes first: two may not fit in memory.
        self._engine, self._loaded, self._known = None, None, {}
        say = words(run.ask.language)

        def progress(text: str) -> None:
            _go_on(run)
            run.state("compiling" if text.startswith("Compiling") else "loading", text)

        run.state("loading", say["looking"])
        _fetch(wanted, run)
        _go_on(run)
        engine, self._pair = open_engine(wanted, progress, suited=True)
        run.state("loading", say["warming_up"])
        if engine.block and engine.tokenizer is not None:
            # As the lanes will decode: what an adaptive schedule tries out first is tried out here.
            warm_up(engine, WARM_UP, settings.decoding(suited=True).measured(engine), threading.Event())
        self._engine, self._loaded = engine, wanted
        self._known = {"engine": dict(engine.description), "pair": self._pair, "parts": machine.placed(engine)}
        return engine

    def _header(self, engine: Engine, run: service.Run, decoding: Decoding, lanes: Sequence[Mode]) -> Message:
        facts, here = engine.description, machine.here()
        return run_message(
            id=run.id[:8],
            prompt=run.ask.prompt,
            pair=self._pair,
            engine=facts.get("engine"),
            device=facts.get("device"),
            dtype=facts.get("dtype"),
            threads=facts.get("threads"),
            machine=f"{here['processor']}, {here['cores']} cores",
            block=engine.block,
            schedule=str(decoding.schedule) if engine.block else None,
            sampling={k: v for k, v in asdict(decoding.sampling).items() if isinstance(v, int | float)},
            max_new_tokens=decoding.max_new_tokens,
            memory=machine.placed(engine) or None,
            lanes=sorted(lanes, reverse=True),
        )

    def _lane(
        self, engine: Engine, run: service.Run, decoding: Decoding, prompt_ids: tuple[int, ...], lane: Mode
    ) -> Run:
        writer = LaneWriter(lane, text_stream(engine), engine.decode if engine.tokenizer is not None else None)
        heat = Heat(Prompt("prompt", "page", turns=(run.ask.prompt,)), 0, 1, 0, 0, lane, prompt_ids)
        rounds = []
        for round_ in engine.generate(decoding.request(engine, prompt_ids, lane, lane), run.cancelled):
            rounds.append(round_)
            run.tell(partial(_message, writer, round_))
        return Run(heat, tuple(rounds), 0.0)

    def _verdict(self, engine: Engine, plain: Run, dspark: Run, decoding: Decoding, language: str) -> Message:
        from local_runner.identity import judge

        identical, difference, remark = of_identity(judge(engine, [plain, dspark], decoding))
        return verdict(plain.rounds, dspark.rounds, identical, language, difference, remark)


ENGINE_SETTINGS = (
    "pair",
    "target",
    "draft",
    "block",
    "engine",
    "dtype",
    "device",
    "threads",
    "context_length",
    "compile",
)


class Recorded:
    """A recorded run: nothing is decoded, so nothing has to be installed for it."""

    name = "recording"

    def run(self, run: service.Run) -> None:
        """Raises InputError: a recording answers nothing else."""
        raise InputError(words(run.ask.language)["only_replay"])

    def machine(self) -> dict[str, Any]:
        """What is here."""
        return {"machine": machine.here()}


def _message(writer: LaneWriter, round_: Round) -> list[Message]:
    return [writer.message(round_)]


def _go_on(run: service.Run) -> None:
    """Raises Stopped if the run has been cancelled; between two steps of loading, because a step cannot be cut."""
    if run.cancelled.is_set():
        raise Stopped


def _fetch(settings: Settings, run: service.Run) -> None:
    """Fetch a pair that is not here yet, with its progress on the page."""
    from local_runner.pairs import DEFAULT_PAIR
    from local_runner.store import resolve_pair

    if settings.target:
        return
    last = [-1]

    def report(what: str, done: int, total: int) -> None:
        _go_on(run)
        percent = 100 * done // total if total else 0
        if percent != last[0]:
            last[0] = percent
            run.state("downloading", what, fraction=min(1.0, done / total) if total else None)

    resolve_pair(settings.pair or DEFAULT_PAIR, may_pull=True, report=report)
