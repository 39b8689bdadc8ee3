import runpy
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from local_runner.options import Settings
from sglang_dspark.decoding.rounds import Round, summarise
from sglang_dspark.errors import InputError
from ui import sources
from ui.ask import Ask, AskKind
from ui.messages import LANES, Message, lane_rounds, lane_text
from ui.service import Run
from ui.sources import Local, Recorded

KIT = runpy.run_path(str(Path(__file__).with_name("fake_demo.py")))
SETTINGS = Settings(max_new_tokens=24)


class Loads:
    """Stands for the loading of engines; remembers what was asked for."""

    def __init__(self) -> None:
        self.engine = KIT["fake_engine"]()
        self.settings: list[Settings] = []

    def open(self, settings: Settings, say: Callable[[str], None], *, suited: bool) -> tuple[Any, str]:
        self.settings.append(settings)
        say("Reading the target fake")
        say("Compiling kernel.cpp with c++ (a few seconds, once)")
        return self.engine, "fake-pair"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    made = Loads()
    monkeypatch.setattr(sources, "open_engine", made.open)
    monkeypatch.setattr(sources, "_fetch", lambda settings, run: None)
    return made


def ask(kind: AskKind = "race", prompt: str = "Why is the sky blue?", **more: Any) -> Ask:
    settings = replace(SETTINGS, **more.pop("settings", {}))
    return Ask(kind, settings, ({"role": "user", "content": prompt},), **more)


def done(local: Local, asked: Ask) -> list[Message]:
    run = Run(asked)
    local.run(run)
    return run.after()


def lanes_in_order(messages: list[Message]) -> list[str]:
    return [m["lane"] for m in messages if m["type"] == "state" and m["state"] == "running"]


def test_a_race_is_told_from_loading_to_verdict(loads: Loads) -> None:
    messages = done(Local(SETTINGS), ask())
    kinds = [m["type"] for m in messages]
    assert [m["state"] for m in messages[: kinds.index("run")]][-4:] == ["loading", "compiling", "loading", "loading"]
    header = messages[kinds.index("run")]
    assert header["pair"] == "fake-pair" and header["block"] == 4 and header["schedule"] == "fixed"
    assert header["prompt"] == "Why is the sky blue?" and header["lanes"] == ["plain", "dspark"]
    assert header["dtype"] == "float32" and header["max_new_tokens"] == 24
    assert kinds[-3:] == ["statistics", "statistics", "verdict"]
    texts = {lane: lane_text(messages, lane) for lane in LANES}
    tokens = [t for r in lane_rounds(messages, "plain") for t in r.committed]
    assert texts["plain"] == texts["dspark"] == loads.engine.decode(tokens)
    verdict = messages[-1]
    speeds = {lane: summarise(lane_rounds(messages, lane)).tokens_per_s for lane in LANES}
    assert verdict["identical"] is True and verdict["speedup"] == pytest.approx(speeds["dspark"] / speeds["plain"])
    assert verdict["reason"].startswith("DSpark wins: a round commits")
    statistics = next(m for m in messages if m["type"] == "statistics" and m["lane"] == "dspark")
    assert statistics["values"]["tokens_per_s"] == speeds["dspark"]


def test_times_shown_are_those_of_the_rounds(loads: Loads) -> None:
    made: list[Round] = []
    generate = loads.engine.generate

    def noted(*args: Any) -> Any:
        for round_ in generate(*args):
            made.append(round_)
            yield round_

    local = Local(SETTINGS)
    done(local, ask())
    made.clear()
    loads.engine.generate = noted
    messages = done(local, ask())
    assert [Round.from_dict(m["round"]) for m in messages if m["type"] == "round"] == made


def test_the_lane_that_goes_first_alternates(loads: Loads) -> None:
    local = Local(SETTINGS)
    assert lanes_in_order(done(local, ask())) == ["plain", "dspark"]
    assert lanes_in_order(done(local, ask())) == ["dspark", "plain"]


def test_the_engine_is_loaded_once_for_settings_that_load_the_same(loads: Loads) -> None:
    local = Local(SETTINGS)
    done(local, ask())
    done(local, ask(prompt="Another", settings={"temperature": 0.5, "seed": 3, "max_new_tokens": 9}))
    assert len(loads.settings) == 1
    done(local, ask(settings={"dtype": "float32"}))
    assert [s.dtype for s in loads.settings] == ["auto", "float32"]


@pytest.mark.parametrize(
    ("planted", "numerics", "remark"),
    [
        ({"margin": 0.01, "noise": 0.1}, True, ""),
        ({"margin": 5.0, "noise": 0.1}, False, "FAILURE"),
    ],
)
def test_a_difference_is_judged_as_the_race_command_judges_it(
    loads: Loads, planted: dict[str, float], numerics: bool, remark: str
) -> None:
    loads.engine = KIT["fake_engine"](flip=9, **planted)
    verdict = done(Local(SETTINGS), ask())[-1]
    assert verdict["identical"] is False
    assert verdict["first_difference"] == {"position": 9, "numerics": numerics, **planted}
    assert remark in verdict["reason"]


def test_sampled_drafts_are_not_compared(loads: Loads) -> None:
    settings = {"temperature": 0.8, "draft_style": "sampled"}
    verdict = done(Local(SETTINGS), ask(settings=settings))[-1]
    assert verdict["identical"] is None and "Not comparable" in verdict["reason"]


def test_where_plain_decoding_wins_the_reason_has_the_measured_price(loads: Loads) -> None:
    loads.engine = KIT["fake_engine"](plain_s=0.01, dspark_s=0.09)
    messages = done(Local(SETTINGS), ask())
    rounds = lane_rounds(messages, "dspark")[1:]
    cost = sum(r.draft_s + r.verify_s for r in rounds) / len(rounds) / 0.01
    tokens = sum(len(r.committed) for r in rounds) / len(rounds)
    reason = messages[-1]["reason"]
    assert reason.startswith("Plain decoding wins here because a round costs")
    assert f"{cost:.2f} plain steps" in reason and f"only {tokens:.2f} tokens" in reason
    assert messages[-1]["speedup"] == pytest.approx(tokens / cost)
    korean = done(Local(SETTINGS), ask(language="ko"))[-1]["reason"]
    assert "일반 디코딩이 이깁니다" in korean and f"{cost:.2f}" in korean


def test_a_run_stops_at_the_next_round(loads: Loads) -> None:
    local, run = Local(SETTINGS), Run(ask(settings={"max_new_tokens": 500}))
    done(local, ask())
    generate = loads.engine.generate

    def cancelling(request: Any, cancelled: threading.Event) -> Any:
        for number, round_ in enumerate(generate(request, cancelled)):
            yield round_
            if number == 5:
                run.cancelled.set()

    loads.engine.generate = cancelling
    local.run(run)
    assert len([m for m in run.after() if m["type"] == "round"]) == 6
    assert "verdict" not in [m["type"] for m in run.after()]


def test_text_is_made_by_who_reads_it_and_not_between_rounds(loads: Loads) -> None:
    local = Local(SETTINGS)
    done(local, ask())
    decoded: list[int] = []
    stream = loads.engine.text_stream
    loads.engine.text_stream = lambda: types.SimpleNamespace(push=lambda t: decoded.extend(t) or stream().push(t))
    run = Run(ask(prompt="Another"))
    local.run(run)
    assert not decoded
    assert lane_text(run.after(), "plain") and decoded


def test_an_answer_has_one_lane_and_the_whole_conversation(loads: Loads) -> None:
    talk = [("system", "Be kind."), ("user", "Hello"), ("assistant", "Hello."), ("user", "Who are you?")]
    conversation = tuple({"role": role, "content": content} for role, content in talk)
    local = Local(SETTINGS)
    messages = done(local, Ask("chat", SETTINGS, conversation))
    assert loads.engine.conversations[-1] == list(conversation)
    assert lanes_in_order(messages) == ["dspark"] and messages[-1]["type"] == "statistics"
    assert lanes_in_order(done(local, Ask("chat", SETTINGS, conversation, plain=True))) == ["plain"]


def test_without_a_draft_answers_are_plain_and_races_refused(loads: Loads) -> None:
    loads.engine = KIT["fake_engine"](block=0)
    local = Local(SETTINGS)
    assert lanes_in_order(done(local, ask("chat"))) == ["plain"]
    with pytest.raises(InputError, match="needs a draft as well as a target"):
        done(local, ask())
    with pytest.raises(InputError, match="경주에는"):
        done(local, ask(language="ko"))


def test_the_machine_is_known_before_and_measured_after_loading(loads: Loads) -> None:
    local = Local(SETTINGS)
    before = local.machine()
    assert before["machine"]["memory_bytes"] > 0 and "engine" not in before
    told = [m for m in done(local, ask("machine")) if m["type"] == "machine"]
    assert told[0]["values"]["curve"]["rows"] == (1, 2, 3, 4, 5)
    assert local.machine()["engine"]["dtype"] == "float32"


def test_a_download_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_pair(name: str, *, may_pull: bool, report: Callable[[str, int, int], None]) -> None:
        for size in range(0, 100_001):
            report("Fetching it", size, 100_000)

    monkeypatch.setattr("local_runner.store.resolve_pair", resolve_pair)
    run = Run(ask())
    sources._fetch(SETTINGS, run)
    fractions = [m["fraction"] for m in run.after()]
    assert fractions == sorted(fractions) and len(fractions) == 101 and fractions[-1] == 1.0


def test_a_recording_answers_nothing_else() -> None:
    with pytest.raises(InputError, match="shows a recorded run"):
        Recorded().run(Run(ask()))
    assert Recorded().machine()["machine"]


def test_loading_stops_at_its_next_step(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ask())

    def open_slowly(settings: Settings, say: Callable[[str], None], **options: bool) -> tuple[Any, str]:
        run.cancelled.set()
        return loads.open(settings, say, **options)

    local = Local(SETTINGS)
    monkeypatch.setattr(sources, "open_engine", open_slowly)
    local.run(run)
    assert [m["text"] for m in run.after() if m["type"] == "state"][-1] == "Looking for the models"
    monkeypatch.setattr(sources, "open_engine", loads.open)
    assert done(local, ask())[-1]["type"] == "verdict"


def test_the_engine_is_warmed_up_as_the_lanes_decode(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaptive schedule tries a new head out; that is not to happen in what a user asked first."""
    warmed: list[Any] = []
    monkeypatch.setattr(sources, "warm_up", lambda engine, prompt, decoding, cancelled: warmed.append(decoding))
    loads.engine.adapts = True
    Local(SETTINGS)._open(SETTINGS, Run(ask()))
    assert [str(decoding.schedule) for decoding in warmed] == ["adaptive"]
