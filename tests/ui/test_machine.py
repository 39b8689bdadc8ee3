import runpy
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from local_runner.options import Settings
from local_runner.pairs import DEFAULT_PAIR
from ui import machine

FAKE = runpy.run_path(str(Path(__file__).with_name("fake_demo.py")))["fake_engine"]


class Holder:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_what_is_here_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    found = machine.here()
    assert found["memory_bytes"] >= found["memory_available_bytes"] > 0 and found["gpus"] == []
    assert machine.placed(SimpleNamespace(target=Holder(), draft=None)) == []


def test_bytes_are_counted_once_and_caches_on_their_own() -> None:
    shared = torch.zeros(1000)
    target = Holder(layers=[Holder(weight=torch.zeros(10, 10), keys=torch.zeros(7)), {"w": shared}], head=shared[:5])
    target.myself = target
    draft = torch.nn.Linear(3, 2)
    draft.embedding = shared
    found = machine.placed(SimpleNamespace(target=target, draft=draft))
    assert found == [
        {"part": "target", "bytes": 400 + 4000, "pool": "cpu"},
        {"part": "caches", "bytes": 28, "pool": "cpu"},
        {"part": "head", "bytes": 24 + 8, "pool": "cpu"},
    ]
    assert machine.placed(SimpleNamespace(engine=SimpleNamespace(target=target, draft=draft))) == found  # a runner


def test_what_a_library_holds_is_not_the_engines() -> None:
    hidden = torch.zeros(9)
    library = types.ModuleType("library")
    library.__dict__["__getattr__"] = library.__dict__["weights"] = hidden
    target = Holder(library=library, kind=type("Kind", (), {"weights": hidden}), call=lambda: hidden)
    assert machine.placed(SimpleNamespace(target=target, draft=None)) == []


def test_an_engine_that_shows_nothing_has_no_parts() -> None:
    assert machine.placed(FAKE()) == []
    assert machine.measured(FAKE(block=0)) is None
    assert machine.measured(FAKE()) == {
        "rows": (1, 2, 3, 4, 5),
        "seconds": (0.010, 0.011, 0.012, 0.014, 0.017),
        "draft_s": 0.004,
    }


def test_what_cannot_be_planned_is_a_note() -> None:
    assert "nowhere" in machine.planned(Settings(target="./nowhere"), 512)["note"]


@pytest.mark.slow
def test_the_default_pair_has_a_place_and_a_reason_for_each_part() -> None:
    plan = machine.planned(Settings(pair=DEFAULT_PAIR), 512)
    assert plan["pools"] and all(pool["bandwidth"] > 0 for pool in plan["pools"])
    assert all(part["bytes"] > 0 and part["reason"] and part["pool"] for part in plan["parts"])


def test_an_engine_whose_tensors_cannot_be_seen_says_what_it_takes() -> None:
    engine: Any = SimpleNamespace(description={"device": "cpu", "memory": {"target": 90, "head": 30, "caches": 7}})
    assert machine.placed(engine) == [
        {"part": "target", "bytes": 90, "pool": "cpu"},
        {"part": "head", "bytes": 30, "pool": "cpu"},
        {"part": "caches", "bytes": 7, "pool": "cpu"},
    ]
