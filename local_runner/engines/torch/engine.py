"""One target and perhaps one draft, ready to decode requests."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from jinja2 import TemplateError

from local_runner.engines.base import Drafter, Request
from local_runner.engines.loop import PREFILL_CHUNK, decode
from local_runner.engines.text import TextStream
from local_runner.engines.torch.drafter import HeadDrafter, KeepingDrafter
from local_runner.engines.torch.load import load_target, load_tokenizer, pick_device, pick_dtype, stop_ids
from local_runner.engines.torch.room import plan_pair
from local_runner.engines.torch.target import NativeTarget, TorchTarget
from sglang_dspark import __version__
from sglang_dspark.decoding.calibrate import Calibration, calibration_file, draft_identity
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.schedule import CostCurve
from sglang_dspark.draft.load import TargetInfo, load_draft
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.errors import InputError
from sglang_dspark.native.draft import NativeDraft


class TorchEngine:
    """Decodes requests with one target and, where there is one, its draft.

    With `reuse_prefix` a request keeps what the caches hold of its prompt from those before it. The answer is the same
    but for near-ties: unless the compiled kernel computes it, what was read in batches of other sizes was rounded
    otherwise.
    """

    adapts = False
    """It has no policy; a `Runner` around it has."""

    def __init__(
        self,
        target: TorchTarget,
        draft: DraftModel | None,
        tokenizer: Any,
        stops: frozenset[int],
        description: dict[str, Any],
    ) -> None:
        self.target, self.tokenizer, self.stop_ids, self.description = target, tokenizer, stops, description
        self.draft = draft
        self._curve: CostCurve | None = None
        self.head: KeepingDrafter | None = HeadDrafter(draft, target) if draft is not None else None
        self.drafter: Drafter | None = self.head
        self.reuse_prefix = False
        self.notes: tuple[str, ...] = tuple(draft.notes) if draft is not None else ()
        target.taps = () if draft is None else tuple(draft.config.target_layer_ids)

    @property
    def block(self) -> int:
        """γ, or 0 without a draft."""
        return 0 if self.draft is None else self.draft.block

    @property
    def has_confidence(self) -> bool:
        """Whether the draft judges its own tokens."""
        return self.draft is not None and self.draft.config.confidence

    def calibrate(self, calibration: Calibration | None) -> None:
        """Calibrate the draft's confidences, or leave them as the head gives them."""
        if isinstance(self.drafter, HeadDrafter):
            self.drafter.calibration = calibration
            self.description["calibrated"] = calibration is not None

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the target's chat template, or of its last text where there is no template."""
        if self.tokenizer.chat_template:
            try:
                encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            except TemplateError as error:
                raise InputError(f"The target's chat template refuses this conversation: {error}.") from error
            return list(encoded["input_ids"])
        return list(self.tokenizer(messages[-1]["content"])["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def text_stream(self) -> TextStream:
        """A new incremental detokeniser."""
        return TextStream(self.decode)

    def generate(self, request: Request, cancelled: threading.Event | None = None) -> Iterator[Round]:
        """Decode one request; setting `cancelled` ends it between rounds."""
        text = self.text_stream().push if self.tokenizer is not None else None
        if self.reuse_prefix:
            self._keep_prefix(request)
        taps = self.target.taps
        try:
            if request.schedule is None:
                self.target.taps = ()  # plain decoding should cost what it costs without a draft
            yield from decode(self.target, self.drafter, request, text, cancelled)
        finally:
            self.target.taps = taps
            self.target.keep = 0  # a request that was refused must not leave its prefix to the next forward
            if self.head is not None:
                self.head.keep = 0

    def _keep_prefix(self, request: Request) -> None:
        """Let the next `reset` keep what all caches that the request needs hold of its prompt, but the last token,
        whose logits are needed.
        """
        prompt = request.prompt_ids[:-1]
        kept = _common(self.target.tokens, prompt)
        if request.schedule is not None and self.head is not None:
            kept = min(kept, _common(self.head.tokens, prompt))
            self.head.keep = kept
        self.target.keep = kept

    def margin(self, prompt_ids: Sequence[int], output_prefix_ids: Sequence[int]) -> tuple[int, int, float]:
        """The target's two best tokens after this prefix, decoded row by row, and how far apart their logits are."""
        self._prefill(prompt_ids)
        logits = self.target.forward(prompt_ids[-1:])
        for token in output_prefix_ids:
            logits = self.target.forward([token])
        best = logits[-1].float().topk(2)
        first, second = best.indices.tolist()
        return first, second, float(best.values[0] - best.values[1])

    def width_noise(self, ids: Sequence[int]) -> float:
        """The greatest difference in logits of the last γ + 1 of `ids` decoded one by one and in one forward.

        Both are plain decoding of the target. What differs is arithmetic alone, so two tokens whose logits are less
        than twice this apart may change places when a block is verified.
        """
        width = min(max(self.block, 1) + 1, len(ids) - 1)
        if width < 1:
            raise InputError("The noise between widths needs a sequence of at least two tokens.")
        self._prefill(ids[: len(ids) - width + 1])
        single = torch.cat([self.target.forward([token]) for token in ids[-width:]]).float()
        self.target.truncate(len(ids) - width)
        return float((self.target.forward(ids[-width:]).float() - single).abs().max())

    def cost_curve(self, repeats: int = 16) -> CostCurve:
        """Measured seconds of verifying 1..γ+1 rows and of drafting a block, at a context of up to 256 tokens.

        The row counts take turns, and the lower quartile of each counts: what else runs on the machine only adds time,
        and a curve bent by it would schedule too much or too little for the whole session. Measured once.
        """
        if self._curve is not None:
            return self._curve
        room = self.target.context_length
        context = max(1, min(256, room - self.block - 2))
        rows = tuple(k for k in range(1, self.block + 2) if context + k <= room)
        if len(rows) < 2:
            raise InputError(f"A context of {room} tokens is too short to schedule blocks; raise --context-length.")
        self._prefill([0] * (context + 1))
        times: dict[int, list[float]] = {k: [] for k in rows}
        for repeat in range(repeats + 1):
            for k in rows:
                began = time.perf_counter()
                self.target.forward([0] * k)[-1, 0].item()
                if repeat:
                    times[k].append(time.perf_counter() - began)
                self.target.truncate(context)
        seconds = tuple(_quartile(times[k]) for k in rows)
        self._curve = CostCurve(rows, seconds, self._draft_seconds(context, repeats))
        return self._curve

    def _draft_seconds(self, context: int, repeats: int) -> float:
        """Seconds of drafting a block after `context` rows of made-up features, and of observing one row."""
        if self.draft is None or self.head is None:
            return 0.0
        self.head.reset()
        width = self.draft.config.feature_size
        self.draft.observe(torch.zeros(context, width, device=self.target.device), 0)
        times = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            self.draft.draft(0, context)
            self.draft.crop(context - 1)
            self.draft.observe(torch.zeros(1, width, device=self.target.device), context - 1)
            times.append(time.perf_counter() - began)
        self.draft.reset()
        return _quartile(times[1:])

    def _prefill(self, ids: Sequence[int]) -> None:
        """Start over with all but the last of `ids` in the target's cache."""
        self.target.reset()
        for start in range(0, len(ids) - 1, PREFILL_CHUNK):
            self.target.forward(ids[start : min(start + PREFILL_CHUNK, len(ids) - 1)], last_only=True)


def _common(held: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their start."""
    return next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt)))


def _settle_heap() -> None:
    """Make glibc keep freed memory: once it has seen a block of this size freed, smaller ones stay in the process.

    Otherwise each round's logits are handed back to the system and faulted in again, which takes milliseconds.
    """
    torch.empty(31 << 20, dtype=torch.uint8).zero_()


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


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
) -> TorchEngine:
    """Read a target (safetensors folder or .gguf file) and a draft (DeepSpec folder) and make them ready.

    A calibration that lies with the draft is used (see `calibration_file`), unless it is for another block; one for
    another draft is refused. `threads` is how many CPU threads PyTorch uses (default: one a physical core),
    `context_length` how many tokens the caches hold, `block` how many tokens of the trained block to draft. `compile`
    is as in `load_target`. `progress` is told what is going on. Raises InputError for what cannot be used, or has no
    room here.
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    cores = threads or psutil.cpu_count(logical=False) or 1
    if cores < 1:
        raise InputError(f"The number of threads must be at least 1, not {threads}.")
    torch.set_num_threads(cores)
    if place.type == "cpu":
        _settle_heap()
    plan = plan_pair(target, draft, dtype=precision, device=place, context_length=context_length, compile=compile)
    progress(f"Reading the target {target.name}")
    model = load_target(
        target, dtype=precision, device=place, context_length=context_length, compile=compile, progress=progress
    )
    tokenizer = load_tokenizer(target)
    head = None
    if draft is not None:
        progress(f"Reading the draft {draft.name}")
        info = TargetInfo(
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            num_layers=model.layers,
            embedding=model.embedding,
            lm_head=model.lm_head,
            name=target.name,
            project=model.project,
        )
        head = load_draft(draft, info, dtype=precision, device=place, block=block, context_length=model.context_length)
        if isinstance(model, NativeTarget):
            if NativeDraft.fits(head):
                head = NativeDraft(head, progress)
            else:
                progress("The draft has a form that the compiled kernel lacks, so it runs uncompiled.")
    description = {
        "engine": "torch",
        "device": str(place),
        "dtype": str(precision).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "forward": type(model).__name__,
        "compiled": isinstance(model, NativeTarget),
        "context_length": model.context_length,
        "target": target.name,
        "draft": None if draft is None else draft.name,
        "plan": plan,
        "versions": {
            "sglang-dspark": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    engine = TorchEngine(model, head, tokenizer, stop_ids(target, tokenizer), description)
    use_calibration(engine, draft)
    return engine


def use_calibration(engine: TorchEngine, draft: Path | None) -> None:
    """Calibrate with what lies beside `draft`, if anything does, and note it; not where it is for another block.

    Raises InputError for a calibration of another draft.
    """
    if draft is None or not (file := calibration_file(draft)).is_file():
        return
    calibration = Calibration.load(file)
    calibration.check(draft_identity(draft))
    if calibration.block == engine.block:
        engine.calibrate(calibration)
        note = f"confidences are calibrated, at temperature {calibration.provenance.get('temperature')}"
    else:
        note = f"confidences are not calibrated: the draft's calibration is for blocks of {calibration.block}"
    engine.notes = (*engine.notes, note)
