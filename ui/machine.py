"""What the machine tab shows: what is here, where the parts of the engine live, and what a step costs."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psutil

from local_runner.engine import Engine
from local_runner.machine.gpus import gpus
from local_runner.options import Settings
from local_runner.pairs import DEFAULT_PAIR
from local_runner.result import machine
from sglang_dspark.errors import InputError

NOT_DATA = (types.ModuleType, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
"""What holds on to half of the program, and to no part of a model."""


def here() -> dict[str, Any]:
    """Processor, cores, memory in bytes, system, and the CUDA devices, if PyTorch is loaded and sees any."""
    return machine() | {"memory_available_bytes": psutil.virtual_memory().available, "gpus": _gpus()}


def placed(engine: Engine) -> list[dict[str, Any]]:
    """The engine's parts: target, draft head and caches, with their bytes and the memory pool that holds them.

    Counted from the tensors that are loaded, each once, or what the engine says where its tensors cannot be seen.
    """
    engine = getattr(engine, "engine", engine)  # a runner's parts are those of the engine within
    if said := getattr(engine, "description", {}).get("memory"):
        pool = str(engine.description.get("device", ""))
        return [{"part": part, "bytes": size, "pool": pool} for part, size in said.items()]
    if "torch" not in sys.modules:
        return []
    seen: set[int] = set()
    parts: dict[tuple[str, str], int] = {}
    for part, root in (("target", getattr(engine, "target", None)), ("head", getattr(engine, "draft", None))):
        for tensor, cached in _tensors(root, seen, False):
            where = ("caches" if cached else part, str(tensor.device))
            parts[where] = parts.get(where, 0) + tensor.untyped_storage().nbytes()
    return [{"part": part, "bytes": size, "pool": pool} for (part, pool), size in parts.items()]


def measured(engine: Engine) -> dict[str, Any] | None:
    """The cost curve: rows, seconds for each, and seconds of a draft; measured if it has not been. None without draft.

    Only for the thread that the engine runs on.
    """
    return asdict(engine.cost_curve()) if engine.block else None


def planned(settings: Settings, context: int) -> dict[str, Any]:
    """What `dspark plan` says: the pools of memory with their measured speed, and each part's pool and the reason.

    A `note` stands in its place where the models' files cannot be planned for. Measures for about a second a pool.
    """
    from local_runner.machine.here import this_machine
    from local_runner.placement import place
    from local_runner.placement.items import Wishes
    from local_runner.plan_command import footprint_of
    from local_runner.plan_view import rows

    try:
        pair = None if settings.target else settings.pair or DEFAULT_PAIR
        plan = place(this_machine(), footprint_of(settings.target, settings.draft, pair), Wishes(context=context))
    except InputError as error:
        return {"note": str(error)}
    return {
        "pools": [asdict(pool) for pool in plan.machine.pools],
        "parts": [{"part": r.part, "bytes": r.bytes, "pool": r.pool, "reason": r.reason} for r in rows(plan)],
    }


def _tensors(root: Any, seen: set[int], cached: bool) -> Iterator[tuple[Any, bool]]:
    """The tensors that hang on `root` and are not `seen` yet, and whether each belongs to a cache."""
    import torch

    if isinstance(root, torch.Tensor):
        memory = root.untyped_storage().data_ptr()
        if memory and memory not in seen:
            seen.add(memory)
            yield root, cached
        return
    if id(root) in seen or isinstance(root, NOT_DATA):
        return
    seen.add(id(root))
    size = _cache_size(root)
    for name, child in _children(root):
        if size is not None and isinstance(child, list):
            for tensor in child:
                yield from _tensors(tensor, seen, tensor.numel() == size)
        else:
            yield from _tensors(child, seen, cached or "cache" in name or name in ("keys", "values"))


def _cache_size(root: Any) -> int | None:
    """How many numbers each cache of the compiled decoder holds; its tensors are all in one list. None for others."""
    from sglang_dspark.native.decoder import TILE, Decoder

    if not isinstance(root, Decoder):
        return None
    rows = -(-root.shape.capacity // TILE) * TILE
    return root.shape.kv_heads * rows * root.shape.head_dim


def _children(root: Any) -> list[tuple[str, Any]]:
    if isinstance(root, dict):
        return [(str(name), child) for name, child in root.items()]
    if isinstance(root, list | tuple):
        return [("", child) for child in root]
    slots = [name for kind in type(root).__mro__ for name in getattr(kind, "__slots__", ())]
    own = getattr(root, "__dict__", {})
    return [*own.items(), *((name, getattr(root, name)) for name in slots if hasattr(root, name))]


def _gpus() -> list[dict[str, Any]]:
    # Looking for them may import PyTorch, which a page that only plays recordings back does without.
    return [{"name": gpu.name, "memory_bytes": gpu.size} for gpu in gpus()] if "torch" in sys.modules else []
