"""What decoding costs on this machine, as one stored result: `python -m local_runner.bench` (or `make bench`).

Step costs, draft costs and the bandwidth of the memory are sampled in turn, so that they can be divided by each other;
then every way to decode answers the same prompts, in turn, prompt by prompt. Tokens per second cover decoding only:
what comes after the step that reads the prompt.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from local_runner.baselines import Decoded, Transformers
from local_runner.bench_tables import Answer, tables, ways_result
from local_runner.engine import Decoding, Mode, encode
from local_runner.engines.torch import TorchEngine, load_engine
from local_runner.engines.torch.gguf import unpacked
from local_runner.files import whole_file
from local_runner.identity import judge
from local_runner.measure import (
    Sample,
    bandwidth,
    draft_sample,
    fill,
    interleaved,
    parameters_read,
    read_samples,
    round_shares,
    step_sample,
)
from local_runner.pairs import DEFAULT_PAIR
from local_runner.progress import shown
from local_runner.prompts import Prompt, parse_ids, read_prompts, take
from local_runner.race import Heat, Run
from local_runner.report import markdown
from local_runner.result import machine, race_result
from local_runner.room import peak, used
from local_runner.store import resolve, resolve_draft, resolve_pair
from local_runner.watchdog import Watchdog, watching
from sglang_dspark.checkpoints.tensors import open_tensors
from sglang_dspark.decoding.rounds import decode_rounds
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.errors import CheckFailed, InputError
from sglang_dspark.native.build import find_compiler

ROWS = tuple(range(1, 17))
CONTEXT = 256
LOOKUP = 7
"""Tokens that prompt lookup guesses a step: as many as the default pair drafts."""
OTHERS = {"transformers generate": None, "transformers generate, prompt lookup": LOOKUP}
MODES: dict[str, dict[str, Any]] = {
    "compiled bfloat16": {"dtype": "bfloat16", "compile": True},
    "bfloat16": {"dtype": "bfloat16", "compile": False},
    "float32": {"dtype": "float32", "compile": False},
}
TITLES: dict[Mode, str] = {"plain": "plain", "dspark": "DSpark"}
RACED = ("compiled bfloat16", "bfloat16")
WARM_UP_TOKENS = 16
SHARED_PROMPTS = 3
"""Prompts that the overhead of a round is taken from."""

Say = Callable[[str], None]
Engines = dict[str, TorchEngine]


def open_engines(target: Path, draft: Path, threads: int | None, say: Say) -> Engines:
    """An engine a mode, all on the CPU. The compiled mode is left out where there is no compiler."""
    engines: Engines = {}
    for name, options in MODES.items():
        if options["compile"] and find_compiler() is None:
            say("There is no C++ compiler, so the compiled mode is left out.")
            continue
        engines[name] = load_engine(target, draft, device="cpu", threads=threads, progress=say, **options)
    return engines


def costs(engines: Engines, parameters: int | None, repeats: int) -> dict[str, Any]:
    """Seconds of a step by rows and of a draft, in each mode, and bytes a second of the memory, sampled in turn.

    `parameters` is how many a step reads. The memory is also read on its own before and after.
    """
    cpu = torch.device("cpu")
    reads = read_samples(cpu)
    before, _ = bandwidth(interleaved(reads, repeats))
    samples: dict[tuple[str, str], Sample] = {}
    for name, engine in engines.items():
        assert engine.draft is not None, "a bench has a draft"
        fill(engine.target, CONTEXT)
        # Threads of the mode before may still spin, so the first step of a turn is taken and not used.
        samples |= {(name, f"settling {i}"): step_sample(engine.target, 1) for i in range(2)}
        samples |= {(name, f"rows {k}"): step_sample(engine.target, k) for k in ROWS}
        samples[name, "draft"] = draft_sample(engine.draft, CONTEXT, cpu)
    taken = interleaved(samples | {("memory", way): sample for way, sample in reads.items()}, repeats, warm_up=2)
    within, way = bandwidth({way: taken["memory", way] for way in reads})
    after, _ = bandwidth(interleaved(reads, repeats))
    modes: dict[str, Any] = {}
    for name, engine in engines.items():
        itemsize = 4 if engine.description["dtype"] == "float32" else 2
        weights_s = None if parameters is None else parameters * itemsize / within
        one, block = taken[name, "rows 1"], taken[name, f"rows {engine.block + 1}"]
        draft = taken[name, "draft"]
        modes[name] = {
            "engine": dict(engine.description),
            "step_s": {str(k): asdict(taken[name, f"rows {k}"]) for k in ROWS},
            "draft_s": asdict(draft),
            "block_rows": engine.block + 1,
            "block_over_one_row": block.median / one.median,
            "draft_over_one_row": draft.median / one.median,
            "weights_s": weights_s,
            "block_over_weights": None if weights_s is None else block.median / weights_s,
        }
    return {
        "context": CONTEXT,
        "parameters_read": parameters,
        "bandwidth": {
            "bytes_per_s": within,
            "before": before,
            "after": after,
            "method": f"the quickest of {repeats} reads of 512 MiB by each of {', '.join(reads)}, taken between the"
            f" steps: {way}",
        },
        "modes": modes,
    }


def overhead(engine: TorchEngine, prompts: Sequence[Sequence[int]], decoding: Decoding) -> dict[str, Any]:
    """Where the time of DSpark's rounds goes (see `measure.Shares`)."""
    requests = [decoding.measured(engine).request(engine, ids, "dspark", "overhead") for ids in prompts]
    shares = round_shares(engine.target, engine.drafter, requests)
    return asdict(shares) | {"overhead_share": shares.overhead}


def compete(
    engines: Engines,
    others: Transformers,
    prompts: Sequence[tuple[Prompt, tuple[int, ...]]],
    decoding: Decoding,
    repeats: int,
    say: Say,
    dog: Watchdog,
) -> tuple[list[Answer], dict[str, list[Run]]]:
    """Let every way decode every prompt in turn; return all answers, and the runs of each engine as `race` orders them.

    Which way goes first moves on with each prompt. Raises CheckFailed when `dog` finds the host short of memory.
    """
    answers: list[Answer] = []
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    some = next(iter(engines.values()))
    for repeat in range(repeats):
        for number, (prompt, ids) in enumerate(prompts):
            say(f"Decoding {prompt.id} ({repeat * len(prompts) + number + 1} of {repeats * len(prompts)})")
            pairs: dict[tuple[str, Mode], Run] = {}

            def decode(name: str, mode: Mode, heat: Heat, pairs: dict[tuple[str, Mode], Run] = pairs) -> Decoded:
                pairs[name, mode] = run = run_heat(engines[name], heat, decoding, dog.cancelled)
                dog.raise_trouble()
                after = decode_rounds(run.rounds)
                return Decoded(sum(len(r.committed) for r in after), sum(r.draft_s + r.verify_s for r in after))

            ways: dict[str, Callable[[], Decoded]] = {}
            modes: tuple[Mode, Mode] = ("plain", "dspark")
            for name in engines:
                for mode in modes:
                    heat = Heat(prompt, number, len(prompts), 0, repeat, mode, ids)
                    ways[f"{TITLES[mode]}, {name}"] = partial(decode, name, mode, heat)
            for name, lookup in OTHERS.items():
                ways[name] = partial(others.generate, ids, decoding.max_new_tokens, some.stop_ids, lookup)
            turn = (number + repeat) % len(ways)
            for way in [*ways][turn:] + [*ways][:turn]:
                decoded = ways[way]()
                answers.append(Answer(way, prompt.domain, repeat, decoded.tokens, decoded.seconds))
            for name in engines:
                runs[name] += [pairs[name, "plain"], pairs[name, "dspark"]]
    return answers, runs


def run_heat(engine: TorchEngine, heat: Heat, decoding: Decoding, cancelled: threading.Event) -> Run:
    """Decode one answer."""
    request = decoding.measured(engine).request(engine, heat.prompt_ids, heat.mode, heat.name)
    began = perf_counter()
    rounds = tuple(engine.generate(request, cancelled))
    return Run(heat, rounds, perf_counter() - began)


def bench(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """The whole result. Raises InputError for models or prompts that cannot be used."""
    target, draft, pair = _paths(options)
    command = shlex.join(["python", "-m", "local_runner.bench", *sys.argv[1:]])
    began = perf_counter()
    given = [parse_ids(text) for text in options.prompt_ids or ()]
    engines = open_engines(target, draft, options.threads, say)
    some = next(iter(engines.values()))
    prompts = _prompts(given, options.limit, some)
    folder = unpacked(target) if target.is_file() else target
    parameters = None
    if folder is not None:
        tensors = open_tensors(folder)
        parameters = parameters_read({name: torch.Size(tensors[name].shape).numel() for name in tensors})

    def decoding(tokens: int) -> Decoding:
        return Decoding(tokens, SamplingParams(), schedule=None)

    say(f"Measuring steps of {ROWS[0]} to {ROWS[-1]} rows, {options.step_repeats} times")
    result: dict[str, Any] = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "pair": pair,
        "machine": machine(),
        "versions": some.description["versions"],
        "threads": some.description["threads"],
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "prompts": len(prompts),
        **costs(engines, parameters, options.step_repeats),
    }
    for name, engine in engines.items():
        say(f"Measuring the overhead of a round in {name}")
        few = [ids for _, ids in prompts[:SHARED_PROMPTS]]
        result["modes"][name]["shares"] = overhead(engine, few, decoding(options.max_new_tokens))

    raced = {name: engines[name] for name in RACED if name in engines}
    others = Transformers(target, torch.bfloat16)
    few_tokens = decoding(min(WARM_UP_TOKENS, options.max_new_tokens))
    with watching(some.description, threading.Event()) as dog:
        compete(raced, others, prompts[:1], few_tokens, 1, lambda _: None, dog)
        answers, runs = compete(raced, others, prompts, decoding(options.max_new_tokens), options.repeats, say, dog)
    result["memory"] = {
        "predicted_peak_bytes": {name: used(e.description)["predicted_peak_bytes"] for name, e in engines.items()},
        "measured_peak_bytes": peak(),
    }
    result["ways"] = ways_result(answers)
    result["race"] = {}
    for name, engine in raced.items():
        say(f"Comparing the answers of {name}")
        raced_with = decoding(options.max_new_tokens).measured(engine)
        identity = judge(engine, runs[name], raced_with)
        race = race_result(engine, pair, runs[name], identity, raced_with)
        result["race"][name] = race | {"command": command}
    result["seconds"] = round(perf_counter() - began, 1)
    return result | {"tables": tables(result)}


def _paths(options: argparse.Namespace) -> tuple[Path, Path, str]:
    if bool(options.target) != bool(options.draft):
        raise InputError("--target and --draft belong together; give both, or neither for the default pair.")
    with shown() as report:
        if options.target:
            target = resolve(options.target, may_pull=True, report=report).target_path
            draft = resolve_draft(options.draft, may_pull=True, report=report)
            return target, draft, f"{target.resolve().name} + {draft.resolve().name}"
        both = resolve_pair(DEFAULT_PAIR, may_pull=True, report=report)
    assert both.draft_path is not None, "a pair has a draft"
    return both.target_path, both.draft_path, DEFAULT_PAIR


def _prompts(given: Sequence[tuple[int, ...]], limit: int, engine: TorchEngine) -> list[tuple[Prompt, tuple[int, ...]]]:
    """Those that were given as token ids, or built-in ones with theirs; of a conversation, the first turn."""
    if given:
        return [(Prompt(f"ids-{n}", "ids", ids=ids), ids) for n, ids in enumerate(given, start=1)]
    chosen = take(read_prompts(), limit)
    return [(p, encode(engine, [{"role": "user", "content": p.turns[0]}])) for p in chosen]


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m local_runner.bench", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("results/bench.json"), help="where the result is stored (%(default)s)")
    add("--target", help="a folder, a .gguf file, a pair's name or a hub id instead of the default pair's target")
    add("--draft", help="its draft")
    add("--threads", type=_at_least_one, help="processor threads (default: one a core)")
    add("--step-repeats", type=_at_least_one, default=15, help="samples of each cost (%(default)s)")
    add("--limit", type=_at_least_one, default=12, help="built-in prompts to decode (%(default)s)")
    add("--prompt-ids", action="append", metavar="1,2,3", help="a prompt as token ids; may be repeated")
    add("--max-new-tokens", type=_at_least_one, default=64, help="the longest an answer gets (%(default)s)")
    add("--repeats", type=_at_least_one, default=3, help="times that every prompt is decoded (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        with whole_file(options.out) as stream:
            result = bench(options, lambda message: print(message, file=sys.stderr, flush=True))
            json.dump(result, stream, indent=1, ensure_ascii=False)
            stream.write("\n")
    except (InputError, CheckFailed) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckFailed) else 2
    except KeyboardInterrupt:
        print("Cancelled; nothing was stored.", file=sys.stderr)
        return 130
    for stored in result["tables"].values():
        print(markdown(stored["columns"], stored["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
