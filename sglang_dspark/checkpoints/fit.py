"""Whether a draft's tensors are those of its configuration, and whether it is one for a target: in words for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from sglang_dspark.checkpoints.drafts import D2T, Draft, Listed
from sglang_dspark.checkpoints.spelling import OPTIONAL, expected_tensors
from sglang_dspark.checkpoints.tensors import Tensors
from sglang_dspark.checkpoints.vocabulary import whole
from sglang_dspark.checkpoints.words import brief
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

NAMED = 3
"""How many offending tensors a message names before it counts the rest."""


def ready(draft: Draft, target_layers: int) -> tuple[DraftConfig, Tensors]:
    """What the PyTorch engine loads: the configuration and tensors of a sound draft, its vocabulary made whole.

    Raises InputError for what the engine does not run and for each missing, misnamed or mis-shaped tensor.
    """
    config = draft.config(target_layers)
    check_anchor(draft)
    for problem in tensor_problems(draft, config):
        raise InputError(problem)
    if draft.reduced:
        draft = whole(draft, config)
        config = draft.config(target_layers)
    return config, Tensors(Path(draft.name), draft.tensors)


def check_anchor(draft: Draft) -> None:
    """Raise InputError for a block that has one row more than it drafts."""
    if draft.reading.anchor_first is False:
        raise InputError(
            f"{draft.name} drafts from its mask rows only (sample_from_anchor is false), a layout that the PyTorch"
            " engine does not run; run it with SGLang, vLLM or llama.cpp."
        )


def tensor_problems(draft: Draft, config: DraftConfig) -> Iterator[str]:
    """A sentence for each way in which the tensors are not those that `config` describes."""
    name, tensors, expected = draft.name, draft.tensors, expected_tensors(config, draft.reduced)
    optional = OPTIONAL[:1] if draft.reduced else OPTIONAL
    missing = [n for n in expected if n not in tensors and n not in optional]
    extra = [n for n in tensors if n not in expected and not (n == D2T and draft.reduced)]
    if missing:
        near = difflib.get_close_matches(missing[0], extra, 1)
        hint = f" ({brief(near[0])} is there: is it misnamed?)" if near else ""
        yield f"{name} lacks {named(missing)}{hint}; the checkpoint is incomplete or of another format."
    if extra:
        near = difflib.get_close_matches(extra[0], expected, 1)
        hint = f" (near to {brief(near[0])})" if near else ""
        yield f"{name} holds {named(extra)}{hint}, which its config.json has no place for; correct either."
    yield from _shape_problems(name, tensors, expected)


def _shape_problems(name: str, tensors: Listed, expected: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for wanted, shape in expected.items():
        if wanted not in tensors:
            continue
        if tensors[wanted].shape != shape:
            yield (
                f"'{wanted}' in {name} has shape {list(tensors[wanted].shape)} where its config.json asks for"
                f" {list(shape)}; correct either."
            )
        elif not is_float(tensors[wanted].dtype):
            yield f"'{wanted}' in {name} is stored as {tensors[wanted].dtype}; convert it to BF16 or F32."


def is_float(dtype: torch.dtype) -> bool:
    """Whether weights of this type can be computed with as they are, without scales from elsewhere."""
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def named(names: Iterable[str]) -> str:
    """The first of `names`, quoted, and how many more there are."""
    listed = [brief(n) for n in names]
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more
