"""Tests of the SGLang backend. Those that need SGLang run in the environment of `make sglang-test`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))


@pytest.fixture(scope="session")
def sglang() -> None:
    """Skips a test where SGLang, or this package's plug-in for it, is not installed."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here; `make sglang-test` runs this in an environment that has it.")
    if not [e for e in importlib.metadata.entry_points(group="sglang.srt.plugins") if e.name == "dspark"]:
        pytest.skip("This package is installed without its entry points for SGLang; run scripts/setup_sglang.sh again.")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(**changes): a tiny DeepSpec draft; `edit` changes its tensors before they are saved."""
    from checkpoint_kit import QWEN3, save, weights

    def build(edit: Callable[[dict[str, Tensor]], Any] | None = None, name: str = "draft", **changes: Any) -> Path:
        config = {**QWEN3, **changes}
        tensors = weights(config)
        if edit is not None:
            edit(tensors)
        return save(tmp_path / name, config, tensors)

    return build


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The folder of a target that those drafts fit: its configuration alone."""
    from checkpoint_kit import TARGET

    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    return folder
