"""The scripted engine, for tests of everything that stands on an engine."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FAKE_PROGRAM = Path(__file__).with_name("fake_engine.py")


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module of the scripted engine."""
    spec = importlib.util.spec_from_file_location("fake_engine", FAKE_PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fake_program() -> Path:
    """The program `dspark` on the scripted engine."""
    return FAKE_PROGRAM
