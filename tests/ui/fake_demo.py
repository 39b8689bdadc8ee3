"""`dspark demo` on the scripted engine; arguments are those of `dspark`, and `--sleep-s` slows its rounds."""

import argparse
import importlib.util
import types
from pathlib import Path
from typing import Any

from sglang_dspark.decoding.schedule import CostCurve


def load_fake() -> types.ModuleType:
    """The module of the scripted engine."""
    file = Path(__file__).parents[1] / "local_runner" / "fake_engine.py"
    spec = importlib.util.spec_from_file_location("fake_engine", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_engine(**planted: Any) -> Any:
    """A scripted engine that also knows what a step costs."""
    engine = load_fake().FakeEngine(**planted)
    engine.cost_curve = lambda: CostCurve((1, 2, 3, 4, 5), (0.010, 0.011, 0.012, 0.014, 0.017), 0.004)
    return engine


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sleep-s", type=float, default=0.0)
    ours, theirs = parser.parse_known_args()
    load_fake().install(fake_engine(sleep_s=ours.sleep_s))
    from local_runner.cli import app
    from ui import sources

    sources._fetch = lambda settings, run: None  # type: ignore[assignment]
    app(theirs, prog_name="dspark")
