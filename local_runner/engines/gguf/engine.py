"""One GGUF target and perhaps one GGUF draft, ready to decode requests on llama.cpp."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from local_runner.engines.base import Request
from local_runner.engines.gguf.context import Model
from local_runner.engines.gguf.drafter import LlamaDrafter
from local_runner.engines.gguf.files import DraftFile, TargetFile, converted, read_draft_file, read_target_file
from local_runner.engines.gguf.library import PACKAGE, VERSION, Library, load_library
from local_runner.engines.gguf.room import plan_pair
from local_runner.engines.gguf.target import OUTPUTS, LlamaTarget
from local_runner.engines.gguf.tokenizer import read_tokenizer
from local_runner.engines.torch.engine import TorchEngine, use_calibration
from local_runner.engines.torch.load import DEFAULT_CONTEXT, stop_ids
from local_runner.footprint.caches import caches, from_gguf
from sglang_dspark import __version__
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.decoding.calibrate import Calibration
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError

HALF = 2
"""Bytes of a float16."""
MOST_THREADS = 512
"""More would end the process."""


class LlamaEngine(TorchEngine):
    """Decodes requests with one target and, where there is one, its draft. What llama.cpp computes comes as tensors, so
    measuring, encoding and the loop are the PyTorch engine's.
    """

    def __init__(
        self,
        target: LlamaTarget,
        drafter: LlamaDrafter | None,
        tokenizer: Any,
        stops: frozenset[int],
        description: dict[str, Any],
        *,
        confident: bool,
    ) -> None:
        taps = target.taps
        super().__init__(target, None, tokenizer, stops, description)
        target.taps = taps
        self.llama_target, self.llama_drafter = target, drafter
        self.drafter = self.head = drafter
        self._confident = confident

    @property
    def block(self) -> int:
        """γ, or 0 without a draft."""
        return 0 if self.llama_drafter is None else self.llama_drafter.block

    @property
    def has_confidence(self) -> bool:
        """Whether the draft judges its own tokens."""
        return self._confident

    def calibrate(self, calibration: Calibration | None) -> None:
        """Calibrate the draft's confidences, or leave them as the head gives them."""
        if self.llama_drafter is not None:
            self.llama_drafter.calibration = calibration
            self.description["calibrated"] = calibration is not None

    def generate(self, request: Request, cancelled: threading.Event | None = None) -> Iterator[Round]:
        """Decode one request; setting `cancelled` ends it between rounds.

        Raises InputError for drafts that should be drawn from a distribution: the library drafts greedily.
        """
        if request.schedule is not None and request.draft_style == "sampled" and not request.sampling.greedy:
            raise InputError("llama.cpp drafts the head's best tokens only; use --draft-style greedy.")
        yield from super().generate(request, cancelled)

    def _draft_seconds(self, context: int, repeats: int) -> float:
        """Seconds of drafting a block after `context` rows of made-up features, and of observing one row."""
        drafter = self.llama_drafter
        if drafter is None:
            return 0.0
        drafter.reset()
        drafter.commit(np.zeros((context, drafter.width), np.float32), [0] * context)
        times = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            drafter.draft(0, context)
            drafter.truncate(context - 1)
            drafter.commit(np.zeros((1, drafter.width), np.float32), [0])
            times.append(time.perf_counter() - began)
        return sorted(times[1:])[repeats // 4]


def load_engine(
    target: Path,
    draft: Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    context_length: int | None = None,
    block: int | None = None,
    compile: bool | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> LlamaEngine:
    """Read a .gguf target and a draft (a .gguf file, or a checkpoint that is converted once) and make them ready.

    A calibration that lies with the draft is used, unless it is for another block; one for another draft is refused.
    `threads` is how many CPU threads compute (default: one a physical core), `context_length` how many tokens the
    caches hold, `block` how many tokens of the trained block to draft. `progress` is told what is going on.
    Raises InputError for what cannot be used, or has no room here.
    """
    if dtype != "auto" or compile is not None:
        what = "--compile" if dtype == "auto" else "--dtype"
        raise InputError(f"The gguf engine computes with the types that the file holds; leave {what} out.")
    cores = threads or psutil.cpu_count(logical=False) or 1
    if not 1 <= cores <= MOST_THREADS:
        raise InputError(f"The number of threads must be 1 to {MOST_THREADS}, not {threads}.")
    library = load_library()
    gpu = _gpu(library, device)
    file = read_target_file(target)
    length = min(file.trained_length, DEFAULT_CONTEXT) if context_length is None else context_length
    if not 1 <= length <= file.trained_length:
        raise InputError(
            f"A context of {length} tokens does not fit the target at {target}, which allows {file.trained_length}."
        )
    head = None
    if draft is not None:
        progress(f"Reading the draft {draft.name}")
        head = read_draft_file(converted(draft, file), file)
        rows = _rows(head, block)
    plan = plan_pair(target, None if head is None else head.path, context=length, gpu=gpu)
    progress(f"Reading the target {target.name}")
    taps = tuple(head.config.target_layer_ids) if head is not None else ()
    model = LlamaTarget(_target_model(library, file, gpu), file.architecture, length, cores, taps)
    drafter = None
    if head is not None:
        loaded = Model(library, head.path, gpu=gpu)
        _check_loaded(loaded, head, model)
        drafter = LlamaDrafter(loaded, model, block=rows, confident=head.confident, threads=cores)
    tokenizer = read_tokenizer(file)
    description: dict[str, Any] = {
        "engine": "gguf",
        "device": "gpu" if gpu else "cpu",
        "dtype": file.quantisation,
        "threads": cores,
        "context_length": length,
        "target": file.path.name,
        "draft": None if head is None else head.path.name,
        "draft_dtype": None if head is None else head.quantisation,
        "versions": {
            "sglang-dspark": __version__,
            PACKAGE: VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    confident = head is not None and head.confident
    description["plan"] = plan
    description["memory"] = _memory(file, head, length)
    engine = LlamaEngine(
        model,
        drafter,
        tokenizer,
        stop_ids(target, tokenizer),
        description,
        confident=confident,
    )
    use_calibration(engine, draft)
    return engine


def _memory(file: TargetFile, head: DraftFile | None, length: int) -> dict[str, int]:
    """Bytes of the weights, as the files have them, and of the caches, from the header: the library allocates those
    whole, in float16. A draft's weights and cache are its own; embedding and lm_head are the target's.
    """
    assert file.target.header is not None, "a .gguf file has a header"
    fields = Fields(from_gguf(file.target.header.fields, file.target.layers), file.path)
    kept = sum(c.size(length, 0, "float16") for c in caches(fields, file.target.layers))
    parts = {"target": file.path.stat().st_size}
    if head is not None:
        parts["head"] = head.path.stat().st_size
        kept += sum(2 * a.kv_heads * a.head_dim * HALF * length for a in head.config.attention)
    return parts | {"caches": kept}


def _gpu(library: Library, device: str) -> bool:
    """Whether to compute on a GPU: where the library was built for one, unless told otherwise."""
    here = bool(library.api.llama_supports_gpu_offload())
    if device not in ("auto", "cpu") and not here:
        raise InputError(
            f"This build of {PACKAGE} computes on the CPU only; use --device cpu, or build it for {device}."
        )
    return here and device != "cpu"


def _rows(head: DraftFile, block: int | None) -> int:
    """γ: what was asked for, or the trained block."""
    trained = head.config.block
    rows = trained if block is None else block
    if not 1 <= rows <= min(trained, OUTPUTS - 1):
        raise InputError(
            f"A block of {rows} was asked of {head.path}, which was trained for {trained}; ask for 1 to"
            f" {min(trained, OUTPUTS - 1)}, because llama.cpp skips the Markov head of longer blocks."
        )
    return rows


def _target_model(library: Library, file: TargetFile, gpu: bool) -> Model:
    """The target's weights. Raises InputError if its cache could not be cut after a rejected draft."""
    model = Model(library, file.path, gpu=gpu)
    if not model.forgets():
        raise InputError(
            f"{file.path} is a {file.architecture} model, whose state cannot forget a rejected draft; choose a target"
            " with attention in all layers."
        )
    return model


def _check_loaded(draft: Model, head: DraftFile, target: LlamaTarget) -> None:
    """Raise InputError if the library understood the draft otherwise than its header was read."""
    config = head.config
    for what, theirs, ours in (
        ("vocabulary", draft.vocab_size, target.vocab_size),
        ("hidden size", draft.hidden_size, target.hidden_size),
        ("mask token", draft.mask_token, config.mask_token_id),
    ):
        if theirs != ours:
            raise InputError(
                f"llama.cpp reads a {what} of {theirs} from {head.path}, where {ours} is needed; convert it again."
            )
