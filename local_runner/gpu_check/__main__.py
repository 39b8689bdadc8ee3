"""`python -m local_runner.gpu_check`: check and measure what needs a CUDA device, offline, within eight minutes.

Exit codes: 0 everything passed (or there is no CUDA device, and nothing to check), 1 a part failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import transformers

from local_runner.files import whole_file
from local_runner.gpu_check.costs import costs
from local_runner.gpu_check.graphs import capture
from local_runner.gpu_check.numerics import acceptance_rules, golden_runs, sampled_streams
from local_runner.gpu_check.parts import Part, Result, run_parts, succeeded
from local_runner.gpu_check.race import Models, pair_race
from local_runner.gpu_check.shapes import QWEN3_4B, QWEN3_8B
from local_runner.gpu_check.training import trained_head
from local_runner.pairs import DEFAULT_PAIR
from local_runner.result import machine
from local_runner.store import resolve, resolve_draft, resolve_pair
from sglang_dspark import __version__
from sglang_dspark.errors import InputError

SECONDS = 450
"""All parts together; starting Python and PyTorch comes on top."""
VOCABULARIES = {192: 256, 151_936: 16}
"""Sizes that acceptance is checked at, each with how many requests at once."""
CONTEXTS = (256, 2048)
ROWS = tuple(range(1, 17))
REPEATS = 20
READ_BYTES = 2 << 30
RECIPE = Path(__file__).parents[2] / "configs" / "training" / "smollm2-135m.toml"


def environment(result: Result, device: torch.device) -> None:
    """What the device is and what software drives it."""
    result["machine"] = machine()
    result["versions"] = {
        "sglang-dspark": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        result["device"] = {
            "name": about.name,
            "capability": f"{about.major}.{about.minor}",
            "memory_bytes": about.total_memory,
            "multiprocessors": about.multi_processor_count,
            "integrated": bool(getattr(about, "is_integrated", False)),
        }


def check_parts(device: torch.device, golden: Path | None, models: Models | None) -> list[Part]:
    """The parts in their order: what is cheap and says most comes first."""

    def rules(result: Result) -> None:
        for vocab, requests in VOCABULARIES.items():
            acceptance_rules(result, device, vocab, requests)

    def measure(shape_costs: partial[None]) -> partial[None]:
        return partial(
            shape_costs,
            device=device,
            dtype=torch.bfloat16,
            contexts=CONTEXTS,
            rows=ROWS,
            repeats=REPEATS,
            capture=capture,
            read_bytes=READ_BYTES,
        )

    return [
        Part("environment", 20, partial(environment, device=device)),
        Part("golden runs", 90, partial(golden_runs, device=device, golden=golden)),
        Part("acceptance rules", 30, rules),
        Part("sampled streams", 30, partial(sampled_streams, device=device, golden=golden)),
        *(Part(f"costs of {s.name}", 80, measure(partial(costs, shape=s))) for s in (QWEN3_4B, QWEN3_8B)),
        Part("race", 120, partial(pair_race, device=device, models=models)),
    ]


def find_models(target: str | None, draft: str | None) -> Models | None:
    """The models that were named, else the default pair, else None where that is not here; nothing is fetched."""
    if bool(target) != bool(draft):
        raise InputError("--target and --draft belong together; give both, or neither for the default pair.")
    if target and draft:
        path, head = resolve(target).target_path, resolve_draft(draft)
        return Models(path, head, f"{path.resolve().name} + {head.resolve().name}")
    try:
        pair = resolve_pair(DEFAULT_PAIR)
    except InputError:
        return None
    assert pair.draft_path is not None, "a pair has a draft"
    return Models(pair.target_path, pair.draft_path, DEFAULT_PAIR)


def training_parts(target: str | None, recipe: Path, seconds: float, out: Path) -> tuple[list[Part], float]:
    """The environment and the training of a head, and how long they may take."""
    path = resolve(target or DEFAULT_PAIR).target_path
    part = partial(
        trained_head, device="cuda", target=path, recipe=recipe, seconds=seconds, out=out.with_suffix("") / "head"
    )
    return [
        Part("environment", 20, partial(environment, device=torch.device("cuda"))),
        Part("training", seconds, part),
    ], (seconds + 60)


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m local_runner.gpu_check", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("results/gpu-check.json"), help="where the result is stored (%(default)s)")
    add("--golden", type=Path, help="the folder of recorded runs (default: $DSPARK_GOLDEN)")
    add("--target", help="a folder or a .gguf file to race instead of the default pair's target")
    add("--draft", help="its draft")
    add("--train", type=float, metavar="MINUTES", help="train a head for --target instead, into a folder beside --out")
    add("--recipe", type=Path, default=RECIPE, help="how to train it (%(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so there is nothing to check.")
        return 0
    golden = options.golden or (Path(os.environ["DSPARK_GOLDEN"]) if os.environ.get("DSPARK_GOLDEN") else None)
    began = perf_counter()

    def store(records: Result) -> None:
        # After every part, so that whatever ends this process leaves what was found before it.
        name, record = [*records.items()][-1]
        print(f"{name}: {record['status']} in {record['seconds']} s {record.get('reason', '')}".rstrip(), flush=True)
        for what, met in record.get("checks", {}).items():
            print(f"  {'ok' if met else 'NOT SO'}: {what}", flush=True)
        result = {
            "command": shlex.join(["python", "-m", "local_runner.gpu_check", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(perf_counter() - began, 1),
            "parts": records,
        }
        with whole_file(options.out) as stream:
            json.dump(result, stream, indent=1, ensure_ascii=False)
            stream.write("\n")

    try:
        if golden is not None and not golden.is_dir():
            raise InputError(f"There is no folder {golden}; name that of the recorded runs with --golden.")
        if options.train:
            checks, seconds = training_parts(options.target, options.recipe, options.train * 60, options.out)
        else:
            models = find_models(options.target, options.draft)
            checks, seconds = check_parts(torch.device("cuda"), golden, models), SECONDS
        records = run_parts(checks, seconds, store)
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0 if succeeded(records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
