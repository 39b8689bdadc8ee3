"""Whether a device computes what the CPU computes: recorded runs, sampled streams, and the rules of acceptance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from local_runner.engines.base import Request
from local_runner.engines.torch import TorchEngine, load_engine
from local_runner.gpu_check.parts import Result, Skipped
from local_runner.identity import first_difference
from sglang_dspark.decoding.rounds import Round, decode_rounds, summarise
from sglang_dspark.decoding.sampling import SamplingParams, probabilities
from sglang_dspark.decoding.schedule import Fixed, Threshold
from sglang_dspark.decoding.verify import accept_greedy, accept_point_mass, accept_sampled
from sglang_dspark.errors import InputError

CONFIDENCE_TOLERANCE = 1e-3
STREAM_TOKENS = 48
SEEDS = range(4)


def golden_runs(result: Result, device: torch.device, golden: Path | None) -> None:
    """Each folder of `golden`: in float32 its runs must come out round for round, with confidences within 1e-3; how
    far bfloat16 agrees is written down.
    """
    checks: dict[str, bool] = result.setdefault("checks", {})
    torch.set_float32_matmul_precision("highest")  # no TF32
    for folder in _folders(golden):
        runs = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
        exact = _load(folder, "float32", device)
        decoded = [_decode(exact, run) for run in runs]
        problems = [p for run, rounds in zip(runs, decoded, strict=True) if (p := difference(run, rounds)) is not None]
        checks[f"{folder.name}: float32 runs are the recorded ones"] = not problems
        rounded = _load(folder, "bfloat16", device)
        in_bfloat16 = [_decode(rounded, run) for run in runs]
        result[folder.name] = {
            "forward": exact.description["forward"],
            "runs": len(runs),
            "problems": problems,
            "float32_mean_accepted_length": _accepted_length(decoded),
            "bfloat16_mean_accepted_length": _accepted_length(in_bfloat16),
            "bfloat16_agreement": _agreement(runs, in_bfloat16),
        }


def difference(run: dict[str, Any], rounds: Sequence[Round]) -> str | None:
    """Where decoded `rounds`, the prefill among them, are not those of a recorded run; None if they are."""
    after = decode_rounds(rounds)
    for number, (ours, theirs) in enumerate(zip(after, run["rounds"], strict=False)):
        found = {
            "start": ours.position,
            "anchor": ours.anchor,
            "drafted_full": list(ours.drafted),
            "scheduled": ours.scheduled,
            "accepted": ours.accepted,
            "next_token": ours.next_token,
        }
        for key, value in found.items():
            if value != theirs[key]:
                return f"round {number}: {key} is {value}, recorded was {theirs[key]}"
        wanted = [1 / (1 + math.exp(-c)) for c in theirs["confidence_logits"] or []]
        apart = max((abs(a - b) for a, b in zip(ours.confidence, wanted, strict=True)), default=0.0)
        if not apart <= CONFIDENCE_TOLERANCE:
            return f"round {number}: a confidence is {apart:.2g} from the recorded one"
    if len(after) != len(run["rounds"]):
        return f"there are {len(after)} rounds, recorded were {len(run['rounds'])}"
    if _tokens(rounds)[: run["max_new_tokens"]] != run["output"]:
        return "the output is not the recorded one"
    return None


def sampled_streams(result: Result, device: torch.device, golden: Path | None) -> None:
    """Sampling with point-mass drafts in float32: a seed must give one stream, whichever run, plain or DSpark."""
    checks: dict[str, bool] = result.setdefault("checks", {})
    for folder in _folders(golden)[:1]:
        prompt = json.loads((folder / "golden.json").read_text(encoding="utf-8"))[0]["prompt"]
        here, on_cpu = _load(folder, "float32", device), _load(folder, "float32", torch.device("cpu"))
        again, plain, cpu = [], [], []
        for seed in SEEDS:
            first = _stream(here, prompt, seed, drafts=True)
            again.append(first == _stream(here, prompt, seed, drafts=True))
            plain.append(first == _stream(here, prompt, seed, drafts=False))
            cpu.append(first == _stream(on_cpu, prompt, seed, drafts=True))
        checks["a stream repeats itself"] = all(again)
        checks["DSpark's stream is plain decoding's"] = all(plain)
        result["streams"] = {"pair": folder.name, "seeds": len(SEEDS), "tokens": STREAM_TOKENS}
        result["streams_equal_to_cpu"] = sum(cpu) / len(cpu)


def acceptance_rules(result: Result, device: torch.device, vocab: int, requests: int, block: int = 7) -> None:
    """The rules of acceptance on the device must choose as on the CPU, given the same numbers.

    Half of the drafts are made the target's likeliest tokens, so that all outcomes come up.
    """
    checks: dict[str, bool] = result.setdefault("checks", {})
    generator = torch.Generator().manual_seed(3)
    params = SamplingParams(temperature=0.8)
    p = probabilities(2 * torch.randn(requests, block + 1, vocab, generator=generator), params)
    q = probabilities(p[:, :-1].log() + 0.5 * torch.randn(requests, block, vocab, generator=generator), params)
    likeliest = p[:, :-1].argmax(-1)
    drawn = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(requests, block)
    drafted = torch.where(torch.rand(requests, block, generator=generator) < 0.5, likeliest, drawn)
    scheduled = torch.randint(0, block + 1, (requests,), generator=generator)
    u_accept, u_next = (torch.rand(requests, n, generator=generator, dtype=torch.float64) for n in (block, block + 1))

    rules: dict[str, Callable[[torch.device], tuple[Tensor, Tensor]]] = {
        "greedy": lambda d: accept_greedy(p.to(d).argmax(-1), drafted.to(d), scheduled.to(d)),
        "point mass": lambda d: accept_point_mass(p.to(d), drafted.to(d), scheduled.to(d), u_next.to(d)),
        "sampled": lambda d: accept_sampled(
            p.to(d), q.to(d), drafted.to(d), scheduled.to(d), u_accept.to(d), u_next.to(d)
        ),
    }
    for name, rule in rules.items():
        theirs, ours = rule(torch.device("cpu")), rule(device)
        same = [torch.equal(a, b.cpu()) for a, b in zip(theirs, ours, strict=True)]
        checks[f"{name} acceptance chooses as on the CPU, vocabulary {vocab}"] = all(same)
        result[f"mean accepted, {name}, vocabulary {vocab}"] = float(theirs[0].float().mean())


def _folders(golden: Path | None) -> list[Path]:
    if golden is None:
        raise Skipped("there are no recorded runs; name their folder with --golden or in DSPARK_GOLDEN")
    found = sorted(file.parent for file in golden.glob("*/golden.json"))
    if not found:
        raise InputError(f"{golden} holds no folder with a golden.json; name the folder of recorded runs.")
    return found


def _load(folder: Path, dtype: str, device: torch.device) -> TorchEngine:
    # Models this small only lose by more threads.
    return load_engine(folder / "target", folder / "draft", dtype=dtype, device=str(device), threads=1, compile=False)


def _decode(engine: TorchEngine, run: dict[str, Any]) -> list[Round]:
    # The recorded runs go on while the anchor stands before the end, which is one token more.
    schedule = Threshold(run["confidence_threshold"])
    request = Request(tuple(run["prompt"]), run["max_new_tokens"] + 1, SamplingParams(), schedule=schedule)
    return list(engine.generate(request))


def _stream(engine: TorchEngine, prompt: Sequence[int], seed: int, drafts: bool) -> list[int]:
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)
    schedule = Fixed() if drafts else None
    return _tokens(list(engine.generate(Request(tuple(prompt), STREAM_TOKENS, sampling, schedule=schedule))))


def _tokens(rounds: Sequence[Round]) -> list[int]:
    return [t for r in rounds for t in r.committed]


def _accepted_length(decoded: Sequence[Sequence[Round]]) -> float | None:
    return summarise([r for rounds in decoded for r in rounds]).mean_accepted_length


def _agreement(runs: Sequence[dict[str, Any]], decoded: Sequence[Sequence[Round]]) -> float:
    """The share of the recorded output that comes before the first difference, over all runs."""
    same = 0
    for run, rounds in zip(runs, decoded, strict=True):
        found = first_difference(run["output"], _tokens(rounds)[: run["max_new_tokens"]])
        same += len(run["output"]) if found is None else found[0]
    return same / sum(len(run["output"]) for run in runs)
