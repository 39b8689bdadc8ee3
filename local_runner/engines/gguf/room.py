"""What the llama.cpp engine asks of a machine before it reads a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from local_runner.footprint import Footprint
from local_runner.footprint.held import in_llama, with_held
from local_runner.footprint.read import read_footprint
from local_runner.placement.items import Wishes
from local_runner.room import Choice, make_room
from sglang_dspark.checkpoints.places import Folder
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.errors import InputError


def plan_pair(target: Path, draft: Path | None, *, context: int, gpu: bool) -> dict[str, Any] | None:
    """As `make_room`; `draft` is the .gguf file that is loaded. None for files that only their loader knows what to say
    of.
    """
    try:
        alone = read_footprint(Folder(target), None)
        whole = alone if draft is None else read_footprint(Folder(target), read_draft(draft))
    except (InputError, OSError):
        return None

    def sized(choice: Choice) -> tuple[Footprint, Wishes]:
        f = whole if choice.drafting else alone
        return f if gpu else with_held(f, in_llama(f)), Wishes(choice.context, cache_dtype="float16")

    return make_room(sized, Choice(context, None, draft is not None), "cuda:0" if gpu else "cpu")
