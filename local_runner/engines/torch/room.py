"""What the PyTorch engine asks of a machine before it reads a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from local_runner.engines.torch.gguf import kept_copy
from local_runner.engines.torch.lean import FAMILIES
from local_runner.engines.torch.load import DEFAULT_CONTEXT
from local_runner.footprint import Footprint
from local_runner.footprint.held import Forward, in_torch, with_held
from local_runner.footprint.read import read_footprint
from local_runner.placement.items import Precision, Wishes
from local_runner.room import Choice, make_room
from sglang_dspark.checkpoints.places import Folder
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.draft.linear import cpu_multiplies_bfloat16
from sglang_dspark.errors import InputError
from sglang_dspark.native.build import find_compiler
from sglang_dspark.native.decoder import TILE


def plan_pair(
    target: Path,
    draft: Path | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int | None,
    compile: bool | None,
) -> dict[str, Any] | None:
    """As `make_room`, with the options of `load_engine`; None for files that only their loader knows what to say of."""
    try:
        kept = kept_copy(target) if target.suffix == ".gguf" and target.is_file() else None
        footprint = read_footprint(Folder(kept or target), None)
        whole = footprint if draft is None else read_footprint(Folder(kept or target), read_draft(draft))
    except (InputError, OSError):
        return None
    unpacked_first = kept is None and target.is_file()

    def sized(choice: Choice) -> tuple[Footprint, Wishes]:
        f, precision = whole if choice.drafting else footprint, cast(Precision, choice.dtype)
        if device.type == "cpu":
            how = _forward(f, precision, compile)
            f = with_held(f, in_torch(f, how, unpacked_first=unpacked_first))
        return f, Wishes(choice.context, dtype=precision, cache_dtype=precision, head_dtype=precision)

    context = context_length or min(footprint.trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    name = str(dtype).removeprefix("torch.")
    return make_room(sized, Choice(context, name, draft is not None), str(device))


def _forward(f: Footprint, dtype: str, compile: bool | None) -> Forward:
    """What `load_target` will make of it."""
    lean, narrow = f.family in FAMILIES, dtype == "bfloat16"
    tiled = all(size % TILE == 0 for size in (f.hidden, f.inner, f.vocab))
    compiled = lean and narrow and tiled and compile is not False and find_compiler() is not None
    return Forward(dtype, lean, narrow and cpu_multiplies_bfloat16(), compiled)
