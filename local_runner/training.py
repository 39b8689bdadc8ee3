"""Synthesis and training as the commands run them: models loaded, work shared out, progress shown, results written."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from local_runner.files import whole_file
from local_runner.room import resident
from sglang_dspark.errors import InputError
from sglang_dspark.toml import read_toml

if TYPE_CHECKING:
    from sglang_dspark.training.conversations import Conversation
    from sglang_dspark.training.head import Shape
    from sglang_dspark.training.synthesise import Settings
    from sglang_dspark.training.train import Recipe

SHARD = 64
"""Conversations in a shard: what is lost at most when a synthesis is stopped is one of them for each worker."""
SPEAK = 5.0
"""Seconds between two lines of progress."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Where:
    """The target of the work, and what does it."""

    target: Path
    device: str = "auto"
    threads: int = 1


def load(where: Where) -> tuple[Any, Any, frozenset[int]]:
    """The transformers model in float32 (bfloat16 on a GPU), its tokenizer and its stop tokens."""
    import torch

    from local_runner.engines.torch.load import load_model, load_tokenizer, pick_device, stop_ids

    torch.set_num_threads(where.threads)
    device = pick_device(where.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model, _ = load_model(where.target, dtype=dtype, device=device)
    tokenizer = load_tokenizer(where.target)
    return model, tokenizer, stop_ids(where.target, tokenizer)


def synthesise(
    where: Where,
    settings: Settings,
    out: Path,
    *,
    conversations: int,
    seconds: float | None,
    workers: int,
    quantised: bool,
    prompts: Sequence[tuple[str, str]],
    cancelled: threading.Event,
    say: Say,
) -> dict[str, Any]:
    """Add conversations to the folder `out` until it holds so many, or the time is over; return what was made.

    `prompts` are (domain, text) pairs to answer instead of prompts that the target writes. Each worker is a process
    with the target of its own. Raises InputError if one of them fails.
    """
    from sglang_dspark.training.conversations import MANIFEST, read_shard, write_shard

    out.mkdir(parents=True, exist_ok=True)
    there = [c for shard in sorted(out.glob("*.jsonl")) for c in read_shard(shard)]
    begin = max((c.number for c in there), default=-1) + 1
    made, tokens, dropped = len(there), sum(len(c.tokens) - c.answer for c in there), Counter[str]()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    stop = context.Event()
    ends = begin + len(prompts) if prompts else 2**62
    processes = [
        context.Process(
            target=_work,
            args=(where, settings, quantised, range(begin + w, ends, workers), prompts, out, results, stop),
            daemon=True,
        )
        for w in range(workers)
    ]
    for process in processes:
        process.start()
    began: float | None = None  # loading is not synthesis
    first, running, spoken = tokens, workers, 0.0
    pending: list[Conversation] = []
    failure = None
    try:
        while running and failure is None:
            over = seconds is not None and began is not None and time.monotonic() - began >= seconds
            if cancelled.is_set() or over or made >= conversations:
                stop.set()
            try:
                kind, value = results.get(timeout=0.5)
            except queue.Empty:
                if not any(p.is_alive() for p in processes) and results.empty():
                    failure = "a worker ended without a word"
                continue
            began = began or time.monotonic()
            if kind == "conversation" and made < conversations:
                made, tokens = made + 1, tokens + len(value.tokens) - value.answer
                pending.append(value)
                if len(pending) == SHARD:
                    write_shard(out / f"{min(c.number for c in pending):09d}.jsonl", pending)
                    pending = []
                    if time.monotonic() - spoken < SPEAK:
                        continue
                    spoken = time.monotonic()
                    rate = (tokens - first) / (time.monotonic() - began)
                    say(f"{made} of {conversations} conversations, {tokens} answer tokens, {rate:.0f} a second")
            elif kind == "done":
                running -= 1
                dropped.update(value)
            elif kind == "error":
                failure = value
    finally:
        stop.set()
        if pending:
            write_shard(out / f"{min(c.number for c in pending):09d}.jsonl", pending)
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.terminate()
    if failure is not None:
        raise InputError(f"The synthesis stopped: {failure}. What was made is in {out}.")
    wall = time.monotonic() - (began or time.monotonic()) or 1.0
    about = {
        "settings": asdict(settings), "quantised": quantised, "workers": workers, "conversations": made,
        "answer_tokens": tokens, "seconds": round(wall, 1), "answer_tokens_per_s": round((tokens - first) / wall, 1),
        "dropped": dict(dropped),
    }  # fmt: skip
    with whole_file(out / MANIFEST) as file:
        json.dump(about, file, indent=1)
    return about


def _work(
    where: Where, settings: Settings, quantised: bool, numbers: range, prompts: Sequence[tuple[str, str]],
    out: Path, results: Any, stop: Any,
) -> None:  # fmt: skip
    """A worker: makes the conversations of `numbers` and hands them over."""
    from sglang_dspark.training.batched import decoder
    from sglang_dspark.training.conversations import read_shard
    from sglang_dspark.training.synthesise import MARGIN, Synthesis, Template, prompt_key

    try:
        model, tokenizer, stops = load(where)
        template = Template.of(tokenizer, stops) if tokenizer is not None and tokenizer.chat_template else None
        whole = [(d, _prompt_ids(tokenizer, text)) for d, text in prompts]
        around = len(template.before) + len(template.after) if template else 0
        room = model.config.get_text_config().max_position_embeddings - around - MARGIN
        if settings.prompt_tokens + settings.answer_tokens > room:
            settings = replace(settings, prompt_tokens=room // 3, answer_tokens=room - room // 3)
        longest = max((len(ids) for _, ids in whole), default=settings.prompt_tokens + around)
        need = longest + settings.answer_tokens + MARGIN
        seen = []
        if template:
            first, last = len(template.before), len(template.after)
            there = (c for shard in sorted(out.glob("*.jsonl")) for c in read_shard(shard))
            seen = [prompt_key(tokenizer.decode(c.tokens[first : c.answer - last])) for c in there]
        synthesis = Synthesis(
            decoder(model, settings.slots, need, quantised=quantised and model.device.type == "cpu"),
            tokenizer, template, settings, numbers, whole, seen, stops,
        )  # fmt: skip
        results.put(("ready", None))
        synthesis.run(lambda c: results.put(("conversation", c)), stop)
        results.put(("done", dict(synthesis.statistics.dropped)))
    except InputError as error:
        results.put(("error", str(error).rstrip(".")))
    except Exception as error:
        results.put(("error", f"{type(error).__name__}: {error}"))


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    if tokenizer is None:
        raise InputError("The target has no tokenizer, so it cannot read prompts; leave --prompts out.")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)


def train(
    where: Where,
    shape: Shape,
    recipe: Recipe,
    data: Path,
    out: Path,
    *,
    seconds: float | None,
    feature_budget: int,
    precision: str,
    start: Path | None = None,
    cancelled: threading.Event,
    say: Say,
) -> dict[str, Any]:
    """Train a head for the target on the conversations in `data` and write it into `out`; return how it came out.

    Continues what was begun in `out`, or begins with the weights of the head at `start`. Raises InputError for too
    little memory or another recipe than was begun with.
    """
    import torch

    from sglang_dspark.training.features import FeatureCache, TargetReader
    from sglang_dspark.training.head import begin_with, export, head_config, head_fields, mask_of, mask_token
    from sglang_dspark.training.model import TrainableDraft
    from sglang_dspark.training.plan import Part, training_memory
    from sglang_dspark.training.train import Trainer

    model, tokenizer, _ = load(where)
    own = max(0, resident() - sum(p.numel() * p.element_size() for p in model.parameters()))
    text = model.config.get_text_config()
    mask = mask_token(tokenizer, text.vocab_size) if start is None else mask_of(start)
    said = head_fields(model.config, shape, mask)
    config = head_config(said)
    embedding = model.get_input_embeddings().weight
    torch.manual_seed(recipe.seed)
    longest, digest = _about_data(data)
    draft = TrainableDraft(config, embedding, longest + config.block).to(embedding.device)
    if start is not None:
        begin_with(draft, start, text.num_hidden_layers)
    threads = where.threads if embedding.device.type == "cpu" else 1
    parts = (Part("the program", own), *training_memory(draft, model, recipe, longest, feature_budget, threads))
    need = sum(p.bytes for p in parts)
    say("Memory: " + ", ".join(f"{p.name} {p.bytes / 1e6:.0f} MB" for p in parts) + f"; {need / 1e9:.2f} GB in all")
    _check_memory(need - resident(), embedding.device.type)
    reader = TargetReader(model, config.target_layer_ids)
    trainer = Trainer(
        draft,
        FeatureCache(reader, feature_budget),
        recipe,
        data,
        out,
        say,
        _precision(precision, embedding.device.type),
        threads,
    )
    trainer.run(cancelled, seconds)
    progress = trainer.progress
    provenance = {
        "target": where.target.name, "shape": asdict(shape), "recipe": asdict(recipe), "data_sha256": digest,
        "start": start and start.name, "conversations": len(trainer.train), "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "held_out": progress.metrics[-1] if progress.metrics else None, "torch": torch.__version__,
    }  # fmt: skip
    export(trainer.average, said, provenance, out)
    if progress.metrics:
        with whole_file(out / "curve.svg") as file:
            file.write(curve(progress.metrics))
    return provenance


def curve(metrics: Sequence[dict[str, Any]]) -> str:
    """The training curve as SVG: losses, accepted length, and acceptance by position at the end."""
    from local_runner.plots import bar_chart, line_chart, page

    def of(name: str) -> list[tuple[float, float | None]]:
        return [(m["step"], m[name]) for m in metrics]

    last = {str(k): value for k, value in enumerate(metrics[-1]["conditional"], 1)}
    return page(
        [
            line_chart("Loss", {"cross entropy": of("ce")}, "step", "nats a token"),
            line_chart("Distance", {"total variation": of("tv")}, "step", "TV", (0.0, 1.0)),
            line_chart(
                "Held out, teacher forced", {"accepted length": of("accepted_length")}, "step", "tokens a round"
            ),
            bar_chart("Conditional acceptance at the end", last, "accepted"),
        ]
    )


def read_recipe(file: Path | None) -> tuple[Recipe, Shape, dict[str, Any]]:
    """Recipe, shape and synthesis settings of a TOML file with tables [train], [head] and [synthesise]; defaults
    without one. Raises InputError that names the key which is not known.
    """
    from sglang_dspark.training.head import Shape
    from sglang_dspark.training.synthesise import Settings
    from sglang_dspark.training.train import Recipe

    data = {} if file is None else read_toml(file)
    known: dict[str, Any] = {"train": Recipe, "head": Shape, "synthesise": Settings}
    for table, values in data.items():
        if table not in known or not isinstance(values, dict):
            raise InputError(f"The recipe {file} has '{table}', but its tables are {', '.join(known)}.")
        names = {f.name for f in fields(known[table])}
        for name in values:
            if name not in names:
                raise InputError(f"The recipe {file} sets {table}.{name}, which is none of {', '.join(sorted(names))}.")

    def tuples(values: Any) -> Any:
        return tuple(map(tuples, values)) if isinstance(values, list) else values

    made = {name: {k: tuples(v) for k, v in data.get(name, {}).items()} for name in known}
    return replace(Recipe(), **made["train"]), replace(Shape(), **made["head"]), made["synthesise"]


def _about_data(data: Path) -> tuple[int, str]:
    """The longest conversation in tokens, and a hash of all shards."""
    from sglang_dspark.training.conversations import read_shard, shards

    digest, longest = hashlib.sha256(), 0
    for shard in shards(data):
        digest.update(shard.read_bytes())
        longest = max(longest, *(len(c.tokens) for c in read_shard(shard)))
    return longest, digest.hexdigest()


def _check_memory(need: int, device: str) -> None:
    import psutil

    free = psutil.virtual_memory().available
    if device == "cpu" and need > free:
        raise InputError(
            f"Training needs {need / 1e9:.1f} GB more and {free / 1e9:.1f} GB of memory are free; lower"
            " --feature-budget, --anchors in the recipe, or the number of layers."
        )


def _precision(name: str, device: str) -> Any:
    import torch

    if name == "auto":
        # Without instructions of their own, bfloat16 products are slower than float32 ones on a CPU.
        quick = device == "cuda" or (device == "cpu" and torch.cpu._is_avx512_bf16_supported())
        return torch.bfloat16 if quick else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
