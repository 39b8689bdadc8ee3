import json
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from local_runner.engine import Decoding
from local_runner.prompts import Prompt
from local_runner.race import Heat, Run, race, record, warm_up
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

DECODING = Decoding(max_new_tokens=20, sampling=SamplingParams(), schedule=Fixed())
PROMPTS = [Prompt("a", "chat", ("hello",)), Prompt("b", "code", ("write", "again")), Prompt("c", "maths", ids=(3, 4))]


class Diary:
    """Remembers what it was told; cancels after so many rounds."""

    def __init__(self, cancelled: threading.Event, after: int | None = None) -> None:
        self.order: list[tuple[str, str, int]] = []
        self._cancelled, self._after = cancelled, after

    def begin(self, heat: Heat) -> None:
        self.order.append((heat.name, heat.mode, heat.repeat))

    def round(self, heat: Heat, round_: Round) -> None:
        if self._after is not None:
            self._after -= 1
            if self._after == 0:
                self._cancelled.set()

    def end(self, run: Run) -> None:
        pass


def run(engine: Any, repeats: int = 1, after: int | None = None) -> tuple[list[Run], Diary]:
    cancelled = threading.Event()
    diary = Diary(cancelled, after)
    return race(engine, PROMPTS, DECODING, repeats=repeats, watcher=diary, cancelled=cancelled), diary


def test_modes_are_interleaved_and_take_turns_in_going_first(fake: ModuleType) -> None:
    runs, diary = run(fake.FakeEngine(), repeats=2)
    names = ["a", "b", "b#2", "c"]
    assert [name for name, _, _ in diary.order[::2]] == names * 2
    first = {(name, repeat): mode for name, mode, repeat in diary.order[::2]}
    assert first["a", 0] != first["b", 0] == first["b#2", 0] != first["c", 0]
    assert all(first[name, 0] != first[name, 1] for name in names)
    assert [r.heat.mode for r in runs] == ["plain", "dspark"] * 8
    assert all(
        p.heat.name == d.heat.name and p.heat.repeat == d.heat.repeat
        for p, d in zip(runs[::2], runs[1::2], strict=True)
    )


def test_plain_runs_draft_nothing_and_both_answer_the_same_prompt(fake: ModuleType) -> None:
    engine = fake.FakeEngine()
    runs, _ = run(engine)
    for plain, dspark in zip(runs[::2], runs[1::2], strict=True):
        assert not any(r.drafted for r in plain.rounds) and any(r.drafted for r in dspark.rounds)
        assert plain.heat.prompt_ids == dspark.heat.prompt_ids and plain.tokens == dspark.tokens
        assert len(plain.tokens) == 20


def test_a_later_turn_follows_the_plain_answer_even_where_dspark_went_first(fake: ModuleType) -> None:
    engine = fake.FakeEngine(flip=1)
    runs, _ = run(engine)
    conversation = engine.conversations[-1]
    plain = next(r for r in runs if r.heat.name == "b" and r.heat.mode == "plain")
    assert [m["role"] for m in conversation] == ["user", "assistant", "user"]
    assert conversation[1]["content"] == engine.decode(plain.tokens)


def test_a_cancelled_race_keeps_only_whole_pairs(fake: ModuleType) -> None:
    runs, diary = run(fake.FakeEngine(), after=30)
    assert [r.heat.name for r in runs] == ["a", "a"]
    assert diary.order[-1][0] == "b"
    assert [len(one.tokens) for one in runs] == [20, 20]


def test_warm_up_decodes_a_little_in_both_modes(fake: ModuleType) -> None:
    engine = fake.FakeEngine()
    warm_up(engine, PROMPTS[0], DECODING, threading.Event())
    assert [r.schedule is None for r in engine.requests] == [True, False]


def test_recorded_runs_read_back(fake: ModuleType, tmp_path: Path) -> None:
    runs, _ = run(fake.FakeEngine())
    record(runs, tmp_path)
    assert len(list(tmp_path.iterdir())) == len(runs)
    lines = (tmp_path / "b#2.dspark.0.jsonl").read_text(encoding="utf-8").splitlines()
    stored = tuple(Round.from_dict(json.loads(line)) for line in lines)
    assert stored == next(r.rounds for r in runs if r.heat.name == "b#2" and r.heat.mode == "dspark")
