"""The training loop: anchors drawn from sequences, block-parallel passes, checkpoints that continue to the bit."""

from __future__ import annotations

import copy
import json
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.errors import InputError
from sglang_dspark.training.conversations import Conversation, is_held_out, read_shard, shards
from sglang_dspark.training.features import FeatureCache
from sglang_dspark.training.measure import Quality, quality
from sglang_dspark.training.model import TrainableDraft
from sglang_dspark.training.muon import Muon
from sglang_dspark.training.objective import Columns, Weights, objective

CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides how a head comes out, besides the data and the shape of the head."""

    steps: int = 2000
    """How many there are, unless a limit of time ends training before: then the schedule follows the time."""
    sequences: int = 8
    """Sequences whose gradients make one step."""
    anchors: int = 64
    """Blocks drawn from each, in phases of full length."""
    phases: tuple[tuple[float, int], ...] = ((0.0, 0),)
    """(share of the steps at which it begins, rows of a block; 0 is all of them). Shorter blocks first see more
    anchors for the same work, and first positions count most."""
    learning_rate: float = 2e-3
    matrix_learning_rate: float = 0.01
    """Of Muon, which has the layers' matrices."""
    warm_up: int = 50
    weight_decay: float = 0.01
    ema: float = 0.995
    vocabulary_sample: int = 2048
    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    seed: int = 0
    evaluate_every: int = 100
    held_out: int = 48
    """Conversations to evaluate on, at most, of the one in `held_out_share` that is kept from training."""
    held_out_share: int = 24
    patience: int = 0
    """Evaluations without a better head after which to stop; 0 never stops early."""

    def rows(self, done: float, block: int) -> int:
        """How many rows blocks have when the share `done` of the training is."""
        rows = [r for share, r in self.phases if done >= share][-1]
        return min(rows or block, block)

    def rate(self, step: int, done: float) -> float:
        """The share of the learning rate: linear warm-up, then a cosine to a hundredth."""
        warm = min(1.0, (step + 1) / self.warm_up) if self.warm_up else 1.0
        return warm * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, done))) / 2)


@dataclass(slots=True)
class Progress:
    """What has happened so far; part of the checkpoint."""

    step: int = 0
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)
    """The shards in use, in order; new ones join at evaluations."""
    best: float = 0.0
    stale: int = 0
    metrics: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains `model` on the conversations of a folder."""

    def __init__(
        self,
        model: TrainableDraft,
        cache: FeatureCache,
        recipe: Recipe,
        data: Path,
        out: Path,
        say: Callable[[str], None] = lambda line: None,
        precision: torch.dtype = torch.float32,
        threads: int = 1,
    ) -> None:
        """`out` receives `checkpoint/` and `metrics.jsonl`; products are done in `precision`, all else in float32.

        `threads` sequences are computed at once, each by one core: products of their size gain little from a second.
        """
        self.model, self.cache, self.recipe, self.data, self.out, self.say = model, cache, recipe, data, out, say
        self.precision = precision
        self.lm_head = cache.reader.head.weight.detach().float()
        self.average = copy.deepcopy(model).requires_grad_(False)
        matrices, others = _split(model)
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
        ]
        if matrices:
            self.optimisers.append(Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=recipe.weight_decay))
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.progress = Progress()
        self.train: list[Conversation] = []
        self.held_out: list[Conversation] = []
        out.mkdir(parents=True, exist_ok=True)

    def run(self, cancelled: threading.Event, seconds: float | None = None) -> None:
        """Train to the recipe's last step, to `seconds` of training in all, or until `cancelled`; then save.

        Continues from the checkpoint in `out` if there is one.
        """
        self._resume()
        if not self.progress.files:
            self._take_new_shards()
        began = time.monotonic() - self.progress.seconds
        while self.progress.step < self.recipe.steps and not cancelled.is_set():
            step = self.progress.step
            spent = time.monotonic() - began
            done = step / self.recipe.steps if seconds is None else max(step / self.recipe.steps, spent / seconds)
            terms = self._step(step, done)
            self.progress.step += 1
            self.progress.seconds = time.monotonic() - began
            if self.progress.step % self.recipe.evaluate_every == 0 or self.progress.step == self.recipe.steps:
                self._evaluate(terms, done)
                self._take_new_shards()
                self.save()
                if self.recipe.patience and self.progress.stale >= self.recipe.patience:
                    self.say(f"No better head for {self.progress.stale} evaluations: stopping early.")
                    break
            if seconds is not None and self.progress.seconds >= seconds:
                break
        self.save()

    def _step(self, step: int, done: float) -> dict[str, float]:
        recipe, rng = self.recipe, random.Random(f"{self.recipe.seed}/{step}")
        rows = recipe.rows(done, self.model.config.block)
        anchors = recipe.anchors * self.model.config.block // rows
        jobs = []
        for number in range(recipe.sequences):
            chosen = self.train[rng.randrange(len(self.train))]
            first, last = chosen.answer, len(chosen.tokens) - 2
            places = sorted(rng.sample(range(first, last + 1), min(anchors, last + 1 - first)))
            # The weights' sum of a full share of anchors: sequences with fewer count for less.
            scale = recipe.sequences * anchors * rows
            seed = recipe.seed * 1_000_003 + step * recipe.sequences + number
            jobs.append((chosen.tokens, places, rows, scale, seed))
        sums = dict.fromkeys(("loss", "ce", "tv", "confidence", "rows"), 0.0)
        # In the order of the sequences, whoever is first, so that sums have the same bits every time.
        for gradients, found in self.pool.map(lambda job: self._gradients(*job), jobs):
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            for name, value in found.items():
                sums[name] += value
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser, rate in zip(self.optimisers, (recipe.learning_rate, recipe.matrix_learning_rate), strict=False):
            for group in optimiser.param_groups:
                group["lr"] = rate * recipe.rate(step, done)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        decay = min(recipe.ema, (step + 1) / (step + 10))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)
        return {name: value / sums["rows"] for name, value in sums.items() if name != "rows"}

    def _gradients(
        self, tokens: tuple[int, ...], places: list[int], rows: int, scale: float, seed: int
    ) -> tuple[tuple[Tensor, ...], dict[str, float]]:
        """Of all parameters, from blocks of `rows` at `places` of one sequence; and the terms of its loss."""
        recipe, sample = self.recipe, torch.Generator().manual_seed(seed)
        weights = Weights(recipe.ce, recipe.tv, recipe.confidence)
        reading = self.cache.get(tokens)
        columns = Columns.of(reading, self.model.config.vocab_size, recipe.vocabulary_sample, sample)
        at = torch.tensor(places, device=reading.tokens.device)
        with torch.autocast(at.device.type, self.precision, enabled=self.precision is not torch.float32):
            terms = objective(self.model, self.lm_head, reading, at, rows, columns, weights)
        gradients = torch.autograd.grad(terms.loss / scale, tuple(self.model.parameters()), materialize_grads=True)
        names = ("ce", "tv", "confidence", "rows")
        return gradients, {"loss": terms.loss.item(), **{name: getattr(terms, name) for name in names}}

    def measure(self, model: TrainableDraft | None = None) -> Quality:
        """The quality of the averaged weights, or of `model`, on the held-out conversations that are greedy."""
        readings = ((self.cache.get(c.tokens), c.answer) for c in self.held_out)
        return quality(model or self.average, self.lm_head, readings)

    def _evaluate(self, terms: dict[str, float], done: float) -> None:
        found = self.measure()
        p = self.progress
        p.stale = 0 if found.accepted_length > p.best else p.stale + 1
        p.best = max(p.best, found.accepted_length)
        line = {"step": p.step, "seconds": round(p.seconds, 1), "sequences": len(self.train), **terms, **asdict(found)}
        p.metrics.append(line)
        first = " ".join(f"{c:.2f}" for c in found.conditional)
        self.say(
            f"step {p.step}, {min(1.0, done):.0%} done, {p.seconds / 60:.1f} min, {len(self.train)} conversations:"
            f" ce {terms['ce']:.3f}, tv {terms['tv']:.3f}; held out: accepted length {found.accepted_length:.3f},"
            f" by position {first}"
        )

    def _take_new_shards(self) -> None:
        self._use([s.name for s in shards(self.data)])

    def _use(self, names: Sequence[str]) -> None:
        """Read the shards `names` that are not in use yet, behind those that are."""
        held: list[Conversation] = []
        for name in names:
            if name in self.progress.files:
                continue
            self.progress.files.append(name)
            for c in read_shard(self.data / name):
                if is_held_out(c, self.recipe.held_out_share):
                    held.append(c)
                elif len(c.tokens) - c.answer > self.model.config.block + 1:
                    self.train.append(c)
        greedy = [c for c in held if c.temperature == 0.0]
        self.held_out = (self.held_out + greedy)[: self.recipe.held_out]
        if not self.train:
            raise InputError(f"The conversations in {self.data} are too few or too short to train on; make more.")

    def save(self) -> None:
        """Write the checkpoint, whole or not at all: weights and optimiser state as safetensors, progress as JSON."""
        folder, part = self.out / CHECKPOINT, self.out / f".{CHECKPOINT}.part"
        part.mkdir(exist_ok=True)
        tensors = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        tensors |= {f"average.{n}": t for n, t in self.average.state_dict().items()}
        for number, optimiser in enumerate(self.optimisers):
            for index, state in optimiser.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"optimiser.{number}.{index}.{key}"] = torch.as_tensor(value)
        save_file({n: t.contiguous() for n, t in tensors.items()}, part / "state.safetensors")
        (part / "progress.json").write_text(json.dumps({"recipe": asdict(self.recipe), **asdict(self.progress)}))
        # Two renames: between them only the older checkpoint is missing, never half of one in its place.
        old = self.out / f".{CHECKPOINT}.old"
        _remove(old)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        _remove(old)
        (self.out / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in self.progress.metrics))

    def _resume(self) -> None:
        folder = self.out / CHECKPOINT
        if not folder.exists():
            folder = self.out / f".{CHECKPOINT}.old"
        if not (folder / "progress.json").is_file():
            return
        said = json.loads((folder / "progress.json").read_text())
        recipe = said.pop("recipe")
        if recipe != json.loads(json.dumps(asdict(self.recipe))):
            changed = sorted(k for k, v in json.loads(json.dumps(asdict(self.recipe))).items() if recipe.get(k) != v)
            raise InputError(
                f"{self.out} was trained with another recipe ({', '.join(changed)} differ); continue with that one,"
                " or choose another folder."
            )
        tensors = load_file(folder / "state.safetensors")
        self.model.load_state_dict(_under(tensors, "model."))
        self.average.load_state_dict(_under(tensors, "average."))
        for number, optimiser in enumerate(self.optimisers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, value in _under(tensors, f"optimiser.{number}.").items():
                index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
        files = said.pop("files")
        self.progress = Progress(**said)
        self._use(files)
        self.say(f"Continuing from step {self.progress.step}.")


def _split(model: TrainableDraft) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of layers and fusion, for Muon, and everything else."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        inner = name.startswith("layers.") or name == "fc.weight"
        (matrices if inner and parameter.ndim == 2 else others).append(parameter)
    return matrices, others


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _remove(folder: Path) -> None:
    if folder.exists():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
