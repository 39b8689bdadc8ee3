"""Fixtures that make checkpoints; `checkpoint_kit` beside this file holds what tests call directly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """make(**changes): a DeepSpec folder; `without` leaves out a field, `edit` changes the tensors before saving."""
    from checkpoint_kit import QWEN3, save, weights

    def build(
        edit: Callable[[dict[str, Tensor]], Any] | None = None, name: str = "draft", without: str = "", **changes: Any
    ) -> Path:
        whole = {**QWEN3, **changes}
        tensors = weights(whole)
        if edit is not None:
            edit(tensors)
        return save(tmp_path / name, {k: v for k, v in whole.items() if k != without}, tensors)

    return build


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The folder of a target that those drafts fit: its configuration alone."""
    from checkpoint_kit import TARGET

    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    return folder
