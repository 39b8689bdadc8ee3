"""Which engine, precision and number of threads decode a pair quickest here, among what is installed and not given."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from local_runner.engine import Device, Dtype, Kind
from local_runner.engines.torch.engine import TorchEngine
from local_runner.engines.torch.load import pick_device
from local_runner.machine.here import cpu
from local_runner.prompts import read_prompts
from local_runner.runner.profile import Profile, remembered
from local_runner.runner.runner import Runner
from local_runner.runner.trial import BUDGET_S, measure
from sglang_dspark.decoding.schedule import survival
from sglang_dspark.errors import InputError

PACKAGES = ("sglang-dspark", "torch", "transformers", "llama-cpp-python")
WIDER, WIDER_THAN_GGUF = 2.5, 9.0
"""How many times the size of a target's files float32 takes, at most."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a pair; None leaves a choice to the engine."""

    kind: Kind
    dtype: Dtype
    compile: bool | None
    threads: int | None
    device: Device

    def __str__(self) -> str:
        compiled = {True: " compiled", False: " uncompiled", None: ""}[self.compile]
        precision = "" if self.dtype == "auto" else f" {self.dtype}"
        threads = "" if self.threads is None else f" on {self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.kind}{precision}{compiled}{threads}"


@dataclass(frozen=True, slots=True)
class Models:
    """What is to be computed: files of a target and perhaps a draft, and the options that change what rounds cost."""

    target: Path
    draft: Path | None
    block: int | None = None
    context_length: int | None = None


Load = Callable[[Models, Way], TorchEngine]


@dataclass(frozen=True, slots=True)
class Rated:
    """A way and the tokens per second that it promises, plainly and with the best length of prefix."""

    way: Way
    plain: float
    best: float


def open_runner(
    models: Models,
    *,
    kind: Kind | None = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    compile: bool | None = None,
    threads: int | None = None,
    say: Callable[[str], None] = lambda message: None,
    load: Load | None = None,
) -> Runner:
    """Load `models` in the way that promises most tokens per second, of those that the given choices leave.

    Ways that were measured before are not measured again. One that cannot be loaded is left out; raises InputError with
    the reason of the first if none can. `load` is how a way becomes an engine.
    """
    load = load or partial(load_way, say=say)
    found = ways(models, kind=kind, dtype=dtype, device=device, compile=compile, threads=threads)
    profiles: dict[Way, Profile] = {}
    refused: list[InputError] = []
    opened: list[tuple[Way, TorchEngine]] = []

    def engine_of(way: Way) -> TorchEngine:
        if not opened or opened[0][0] != way:
            opened.clear()
            gc.collect()  # the last one's weights go before the next one's come
            opened.append((way, load(models, way)))
        return opened[0][1]

    announced: list[bool] = []

    def measured(way: Way) -> Profile:
        if not announced:
            announced.append(True)
            say(f"Measuring what rounds cost here, for at most {BUDGET_S:.0f} s; it is remembered.")
        engine = engine_of(way)
        # One more than there are, for the second number of threads.
        return measure(engine, _prompt(engine), budget_s=BUDGET_S / (len(found) + 1))

    def look_at(way: Way) -> None:
        try:
            profiles[way], problem = remembered(profile_key(models, way), partial(measured, way))
        except InputError as error:
            refused.append(error)
            return
        if problem:
            say(problem)

    for way in found:
        look_at(way)
    if not profiles:
        raise refused[0]
    if threads is None and (chosen := rate(profiles)[0].way).threads not in (None, 1):
        look_at(replace(chosen, threads=1))
    rated = rate(profiles)
    return Runner(engine_of(rated[0].way), profiles[rated[0].way], reason(rated))


def ways(
    models: Models, *, kind: Kind | None, dtype: Dtype, device: Device, compile: bool | None, threads: int | None
) -> list[Way]:
    """The ways that the given choices leave, on all physical cores where no number of threads is given."""
    on_cpu = device == "cpu" or (device == "auto" and pick_device(device).type == "cpu")
    number = threads or (cpu().cores if on_cpu else None)
    torch_kinds: list[tuple[Dtype, bool | None]] = [(dtype, compile)]
    if on_cpu and dtype == "auto" and compile is None:
        torch_kinds = [("bfloat16", None), ("bfloat16", False)]
        if _room_for_float32(models.target):
            torch_kinds.append(("float32", None))
    found = [Way("torch", d, c, number, device) for d, c in torch_kinds] if kind in (None, "torch") else []
    free = dtype == "auto" and compile is None
    if kind == "gguf" or (kind is None and free and models.target.suffix == ".gguf" and _llama_is_here()):
        found.append(Way("gguf", dtype, compile, number, device))
    return found


def rate(profiles: Mapping[Way, Profile]) -> list[Rated]:
    """What each way promises, the best first.

    How much of a block survives is a matter of the models and not of what computes them, so all ways' counts are added
    up: chance must not decide between them.
    """
    counts = [p for p in profiles.values() if p.tried]
    tried = [sum(column) for column in zip(*(p.tried for p in counts), strict=True)]
    survived = [sum(column) for column in zip(*(p.survived for p in counts), strict=True)]
    a = survival([s / t if t else 0.0 for s, t in zip(survived, tried, strict=True)])
    rated = []
    for way, profile in profiles.items():
        costs = profile.costs()
        drafting = [(1 + sum(a[:k])) / costs.round_s("head", k, True) for k in range(1, len(a) + 1)]
        plain = 1 / profile.plain_s
        rated.append(Rated(way, plain, max(plain, *drafting) if drafting else plain))
    return sorted(rated, key=lambda r: -r.best)


def reason(rated: Sequence[Rated]) -> str:
    """Why the first was chosen, in one sentence with its numbers."""
    first, *others = rated
    gain = f"drafting ({first.plain:.4g} without)" if first.best > first.plain else "plain decoding"
    beside = f"; {', '.join(f'{r.way} {r.best:.4g}' for r in others)}" if others else ""
    return f"{first.way} promises {first.best:.4g} tokens/s with {gain}{beside}."


def profile_key(models: Models, way: Way) -> dict[str, Any]:
    """What a profile depends on: the models' files, the way, the processor, and the versions of what computes."""
    return {
        "target": _files(models.target),
        "draft": None if models.draft is None else _files(models.draft),
        "block": models.block,
        "context_length": models.context_length,
        **asdict(way),
        "processor": asdict(cpu()),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file of a model."""
    files = sorted(f for f in path.iterdir() if f.is_file()) if path.is_dir() else [path]
    return [(str(f.resolve()), (stat := f.stat()).st_size, stat.st_mtime_ns) for f in files]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _llama_is_here() -> bool:
    return _version("llama-cpp-python") is not None


def _room_for_float32(target: Path) -> bool:
    size = sum(size for _, size, _ in _files(target))
    return size * (WIDER_THAN_GGUF if target.suffix == ".gguf" else WIDER) < int(psutil.virtual_memory().available)


def _prompt(engine: TorchEngine) -> Sequence[int]:
    """A built-in question, so that drafts are those of real text; or made-up ids for a target without a tokenizer."""
    if engine.tokenizer is None:
        return [i % min(64, engine.target.vocab_size) for i in range(64)]
    return engine.encode_chat([{"role": "user", "content": read_prompts()[0].turns[0]}])


def load_way(models: Models, way: Way, say: Callable[[str], None]) -> TorchEngine:
    """`models` in an engine that computes `way`. Raises InputError for what it cannot, or has no room for."""
    engine: TorchEngine = import_module(f"local_runner.engines.{way.kind}").load_engine(
        models.target,
        models.draft,
        dtype=way.dtype,
        device=way.device,
        threads=way.threads,
        context_length=models.context_length,
        block=models.block,
        compile=way.compile,
        progress=say,
    )
    return engine
