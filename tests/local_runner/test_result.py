import json
import threading
from types import ModuleType
from typing import Any

import pytest

from local_runner.board import Board
from local_runner.engine import Decoding
from local_runner.identity import judge
from local_runner.prompts import Prompt
from local_runner.race import Run, race
from local_runner.result import figures, machine, race_result
from local_runner.watch import LineWatcher
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

PROMPTS = [Prompt("a", "chat", ids=(1,)), Prompt("b", "chat", ids=(2,)), Prompt("c", "code", ids=(3,))]
DECODING = Decoding(max_new_tokens=21, sampling=SamplingParams(), schedule=Fixed())


def run(engine: Any, repeats: int = 1) -> list[Run]:
    watcher = LineWatcher(Board(engine, "test"), lambda line: None)
    return race(engine, PROMPTS, DECODING, repeats=repeats, watcher=watcher, cancelled=threading.Event())


def test_fields_that_others_rely_on(fake: ModuleType) -> None:
    engine = fake.FakeEngine(plain_s=0.02, dspark_s=0.039)
    runs = run(engine, repeats=2)
    result = race_result(engine, "a-pair", runs, judge(engine, runs, DECODING), DECODING)
    assert json.loads(json.dumps(result)) == result
    assert (result["pair"], result["engine"]["engine"], result["prompts"], result["repeats"]) == (
        "a-pair",
        "fake",
        3,
        2,
    )
    assert result["machine"] == machine()
    assert result["plain"] == {"tokens_per_s": 50.0, "tokens": 2 * 3 * 21}
    rounds = [r for one in runs if one.heat.mode == "dspark" for r in one.rounds if r.index > 0]
    dspark = result["dspark"]
    assert dspark["rounds"] == len(rounds) and dspark["tokens"] == 2 * 3 * 21
    assert dspark["accepted"] == sum(r.accepted for r in rounds) < dspark["scheduled"] == dspark["drafted"]
    assert dspark["mean_accepted_length"] == pytest.approx(1 + dspark["accepted"] / len(rounds), rel=1e-5)
    assert dspark["tokens_per_s"] == pytest.approx(2 * 3 * 20 / (0.04 * len(rounds)), rel=1e-5)
    assert result["speedup"] == pytest.approx(dspark["tokens_per_s"] / 50.0, rel=1e-5)
    assert result["first_difference"] is None
    assert list(result["domains"]) == ["chat", "code"] and result["domains"]["chat"]["prompts"] == 2
    chat, code = (result["domains"][d]["speedup"] for d in ("chat", "code"))
    assert result["macro_mean"]["speedup"] == pytest.approx((chat + code) / 2, rel=1e-5)


def test_a_difference_is_in_the_result(fake: ModuleType) -> None:
    engine = fake.FakeEngine(flip=7, margin=0.25)
    runs = run(engine)
    result = race_result(engine, "a-pair", runs, judge(engine, runs, DECODING), DECODING)
    first = result["first_difference"]
    assert {k: first[k] for k in ("prompt", "position", "margin")} == {"prompt": "a", "position": 7, "margin": 0.25}
    assert result["width_noise"] == 0.1 and result["identity"]["verdict"] == "failure"


def test_figures_are_medians_over_repeats_of_ratios_within_a_repeat(fake: ModuleType) -> None:
    """Plain takes 20, 40, 200 ms a token and DSpark 10 ms a token in three repeats; means would be far off."""
    runs = []
    for repeat, plain_s in enumerate((0.2, 0.02, 0.04)):
        engine = fake.FakeEngine(plain_s=plain_s, dspark_s=0.039)
        for one in run(engine):
            heat = one.heat.__class__(
                one.heat.prompt, one.heat.number, 3, 0, repeat, one.heat.mode, one.heat.prompt_ids
            )
            runs.append(Run(heat, one.rounds, one.wall_s))
    found = figures(runs)
    assert found["plain_tokens_per_s"] == pytest.approx(25.0)
    assert found["speedup"] == pytest.approx((found["dspark_tokens_per_s"] or 0) / 25.0)


def test_overhead_is_the_wall_clock_that_rounds_do_not_account_for(fake: ModuleType) -> None:
    engine = fake.FakeEngine(sleep_s=0.005, plain_s=0.004, dspark_s=0.001)
    runs = run(engine)
    share = race_result(engine, "p", runs, judge(engine, runs, DECODING), DECODING)["overhead_share"]
    assert 0.15 < share["plain"] < 0.6
    assert share["plain"] < share["dspark"] < 0.95


def test_without_decoding_rounds_there_are_no_figures() -> None:
    assert set(figures([]).values()) == {None}
