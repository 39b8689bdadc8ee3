"""The quickest way of those that there are is chosen, explained and remembered."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from local_runner.machine import Cpu
from local_runner.runner import choose
from local_runner.runner.choose import Models, Rated, Way, open_runner, profile_key, rate, reason, ways
from local_runner.runner.profile import Profile
from sglang_dspark.errors import InputError

BFLOAT16 = Way("torch", "bfloat16", None, 2, "auto")
UNCOMPILED = Way("torch", "bfloat16", False, 2, "auto")
FLOAT32 = Way("torch", "float32", None, 2, "auto")
GGUF = Way("gguf", "auto", None, 2, "auto")


def profile(row: float, rows: float, draft: float, tried: int = 10, survived: int = 8) -> Profile:
    return Profile(row, row, (1, 2, 3), (row, rows, rows * 1.1), draft, 0.0, (tried,) * 2, (survived,) * 2)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(choose, "cpu", lambda: Cpu("a processor", 2, ()))
    monkeypatch.setattr(choose, "_llama_is_here", lambda: True)
    target = tmp_path / "target.gguf"
    target.write_bytes(b"weights")
    return Models(target, None)


class Machine:
    """Loads scripted engines and measures them as told."""

    def __init__(self, engines: Callable[..., Any], profiles: dict[Way, Profile | str]) -> None:
        self.engines, self.profiles = engines, profiles
        self.loaded: list[Way] = []
        self.measured: list[Way] = []
        self.budgets: list[float] = []

    def load(self, models: Models, way: Way) -> Any:
        if isinstance(problem := self.profiles[way], str):
            raise InputError(problem)
        self.loaded.append(way)
        return self.engines()

    def measure(self, engine: Any, prompt: Any, budget_s: float) -> Profile:
        self.measured.append(self.loaded[-1])
        self.budgets.append(budget_s)
        found = self.profiles[self.loaded[-1]]
        assert isinstance(found, Profile)
        return found


Opened = Callable[..., tuple[Any, Machine, list[str]]]


@pytest.fixture
def opened(engines: Callable[..., Any], models: Models, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """opened(profiles, **given): a runner, the machine it was chosen on, and what was said."""

    def make(profiles: dict[Way, Profile | str], **given: Any) -> tuple[Any, Machine, list[str]]:
        machine, said = Machine(engines, profiles), list[str]()
        monkeypatch.setattr(choose, "measure", machine.measure)
        return open_runner(models, say=said.append, load=machine.load, **given), machine, said

    return make


def single(way: Way) -> Way:
    return Way(way.kind, way.dtype, way.compile, 1, way.device)


ALL: dict[Way, Profile | str] = {
    BFLOAT16: profile(1.0, 1.1, 0.3),
    UNCOMPILED: profile(2.0, 2.1, 0.5),
    FLOAT32: profile(5.0, 8.0, 1.0),
    GGUF: profile(0.9, 1.8, 1.2),
    single(BFLOAT16): profile(1.5, 1.6, 0.3),
}


def test_the_best_is_chosen_once(opened: Opened) -> None:
    runner, machine, _ = opened(ALL)
    assert machine.measured == [BFLOAT16, UNCOMPILED, FLOAT32, GGUF, single(BFLOAT16)]
    assert machine.loaded[-1] == BFLOAT16 and runner.profile == ALL[BFLOAT16]
    assert sum(machine.budgets) <= 20.0
    again, later, _ = opened(ALL)
    assert later.measured == [] and later.loaded == [BFLOAT16] and again.profile == runner.profile


def test_the_choice_is_one_sentence_with_its_numbers(opened: Opened) -> None:
    runner, _, _ = opened(ALL)
    best = (1 + 0.8 + 0.64) / (0.3 + 1.21)
    assert runner.reason.startswith(
        f"torch bfloat16 on 2 threads promises {best:.4g} tokens/s with drafting (1 without"
    )
    assert "gguf on 2 threads 1.111" in runner.reason and "torch float32 on 2 threads" in runner.reason
    assert runner.reason.count(".\n") == 0 and runner.reason.endswith(".") and runner.reason in runner.notes


def test_without_gain_it_says_plain_decoding() -> None:
    assert reason([Rated(GGUF, 9.0, 9.0)]) == "gguf on 2 threads promises 9 tokens/s with plain decoding."


def test_one_thread_wins_where_it_is_quicker(opened: Opened) -> None:
    runner, machine, _ = opened(ALL | {single(BFLOAT16): profile(0.5, 0.6, 0.1)})
    assert machine.loaded[-1] == single(BFLOAT16) and "on 1 thread promises" in runner.reason


def test_what_is_given_is_not_tried(opened: Opened, models: Models) -> None:
    runner, machine, _ = opened({FLOAT32: ALL[FLOAT32]}, kind="torch", dtype="float32", threads=2)
    assert machine.measured == machine.loaded == [FLOAT32]
    assert [w.kind for w in ways(models, kind="gguf", dtype="auto", device="auto", compile=None, threads=1)] == ["gguf"]
    assert runner.block == 4


def test_ways_that_do_not_load_are_left_out(opened: Opened) -> None:
    _, machine, _ = opened(ALL | {BFLOAT16: "no bfloat16 here", GGUF: "no library", single(UNCOMPILED): "odd"})
    assert machine.loaded[-1] == UNCOMPILED
    with pytest.raises(InputError, match="no such model"):
        opened(dict.fromkeys((GGUF,), "no such model"), kind="gguf")


def test_a_large_target_is_not_widened(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "WIDER_THAN_GGUF", 1e18)
    found = ways(models, kind=None, dtype="auto", device="cpu", compile=None, threads=2)
    assert [w.dtype for w in found] == ["bfloat16", "bfloat16", "auto"]


def test_chance_does_not_decide() -> None:
    """Both ways computed the same drafts, of which more happened to survive in one."""
    lucky, other = profile(1.0, 1.1, 0.4, 10, 9), profile(1.0, 1.1, 0.3, 10, 3)
    assert [r.way for r in rate({BFLOAT16: lucky, UNCOMPILED: other})] == [UNCOMPILED, BFLOAT16]


def test_another_file_way_or_version_is_another_key(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    key = profile_key(models, BFLOAT16)
    assert key == profile_key(models, BFLOAT16)
    assert key != profile_key(models, single(BFLOAT16)) and key != profile_key(models, FLOAT32)
    os.utime(models.target, ns=(1, 1))
    touched = profile_key(models, BFLOAT16)
    assert touched != key
    monkeypatch.setattr(choose, "_version", lambda package: "0")
    assert profile_key(models, BFLOAT16) != touched


@pytest.mark.slow
def test_a_real_target(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path))
    folder, said = golden / "qwen3-vanilla", list[str]()
    models = Models(folder / "target", folder / "draft", context_length=512)
    runner = open_runner(models, device="cpu", say=said.append)
    assert "promises" in runner.reason and runner.block and len(list((tmp_path / "runner").iterdir())) >= 2
    count = sum("Measuring" in line for line in said)
    open_runner(models, device="cpu", say=said.append)
    assert sum("Measuring" in line for line in said) == count
