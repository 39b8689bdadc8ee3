"""What happened in each round, gathered where SGLang runs the model and told where it settles what was answered.

Times are those of the clock on the wall: drafting until verification starts, verification until its result is settled.
On devices that work asynchronously, with overlap scheduling, that is what a client waits for and not what was computed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.serving import channel
from sglang_dspark.serving.tally import Tally

STOPS = {
    "FINISH_MATCHED_TOKEN": "eos",
    "FINISH_MATCHED_STR": "stop_string",
    "FINISHED_MATCHED_REGEX": "stop_string",
    "FINISH_LENGTH": "length",
    "FINISH_ABORT": "cancelled",
}
"""SGLang's reasons to finish."""


class Recorder:
    """The rounds of one process that runs the model: counted, and published if there is somewhere to."""

    def __init__(self, block: int) -> None:
        from sglang.srt.runtime_context import get_observability, get_parallel

        self.tally = Tally(block)
        self.drafting = self.verifying = 0.0
        self.seen: dict[str, Any] | None = None
        parallel, folder = get_parallel(), channel.folder()
        self.publisher: channel.Publisher | None = None
        if folder is None or parallel.attn_tp_rank != 0:
            return
        often = None
        if get_observability().enable_metrics and os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            from sglang_dspark.serving.metrics import Metrics

            metrics = Metrics(block)
            often = lambda: metrics.tell(self.tally)  # noqa: E731
        self.publisher = channel.Publisher(folder, (parallel.dp_rank or 0) + parallel.attn_dp_rank, self.counts, often)

    def counts(self) -> dict[str, Any]:
        """What a snapshot says of this process."""
        return {"block": self.tally.block, **self.tally.to_dict()}

    def tell(self, request: Any, drafted: dict[str, Any], drafting: float, verifying: float) -> None:
        """Publish a request's round, if it answered anything that has not been told."""
        told, index = getattr(request, "dspark_told", (0, 0))
        answer, prompt = request.output_ids, request.origin_input_ids
        end = len(answer) if request.finished_len is None else request.finished_len
        reason = request.finished_reason
        if (end <= told and reason is None) or index < 0:
            return
        stop = None if reason is None else STOPS.get(type(reason).__name__, "cancelled")
        committed = tuple(answer[told:end])
        round_ = Round(
            request=request.rid,
            index=index,
            position=len(prompt) + told - 1,
            anchor=answer[told - 1] if told else prompt[-1],
            committed=committed,
            stop=stop,
            draft_s=drafting,
            verify_s=verifying,
            **(drafted or _undrafted(committed, answer, told)),
        )
        request.dspark_told = (len(answer), index + 1) if stop is None else (end, -1)
        if self.publisher is not None:
            self.publisher.put(round_)


def _undrafted(committed: tuple[int, ...], answer: Any, told: int) -> dict[str, Any]:
    following = committed[0] if committed else answer[told] if told < len(answer) else 0
    return {"drafted": (), "confidence": (), "scheduled": 0, "accepted": 0, "next_token": following}


def equip(result: None, observers: Any, *, gamma: int, **more: Any) -> None:
    """After SGLang's own observers of a worker are made: give them a recorder."""
    observers.dspark = Recorder(gamma)


def confident(original: Callable[[Any], Any], config: Any) -> Any:
    """Around the making of a draft's confidence head, which SGLang leaves out where it does not schedule by it."""
    from sglang.srt.models import dspark
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode

    if not getattr(config, "enable_confidence_head", False):
        return original(config)
    mode = dspark.read_ragged_verify_mode
    dspark.read_ragged_verify_mode = lambda: RaggedVerifyMode.COMPACT
    try:
        return original(config)
    finally:
        dspark.read_ragged_verify_mode = mode


def drafting(observers: Any) -> None:
    """Before a round begins."""
    observers.dspark.drafting = time.perf_counter()


def verifying(observers: Any, name: Any) -> None:
    """Before a part of a round is timed by SGLang."""
    if name == "target_verify":
        observers.dspark.verifying = time.perf_counter()


def seen(observers: Any, **step: Any) -> None:
    """Before SGLang observes a round: keep what it is shown until its result is settled."""
    layout, confidence = step["layout"], step["confidence"]
    shown = {
        "drafts": step["draft_tokens"],
        "bonus": step["bonus"],
        "commits": step["commit_lens"],
        "rows": None if layout is None else layout.verify_lens,
        "confidence": None if confidence is None else confidence.float(),
    }
    # Captured graphs write the next round's to the same places.
    observers.dspark.seen = {name: None if value is None else value.clone() for name, value in shown.items()}


def begin(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before a step of the worker."""
    worker.dspark_begun = time.perf_counter()


def attach(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """After a step of the worker: let its result carry what was seen of it."""
    observers = getattr(worker, "_observers", None)
    recorder: Recorder | None = getattr(observers, "dspark", None)
    if recorder is not None:
        result.dspark = (recorder, recorder.seen, worker.dspark_begun, recorder.verifying)
        recorder.seen = None


def prefilled(nothing: None, processor: Any, batch: Any, result: Any, *args: Any) -> None:
    """After the result of a prefill is settled: the first round of each request whose prompt is complete."""
    recorder, _, begun, _ = getattr(result, "dspark", (None, None, 0.0, 0.0))
    if recorder is not None:
        seconds = time.perf_counter() - begun
        for request in batch.reqs:
            recorder.tell(request, {}, 0.0, seconds)


def decoded(nothing: None, processor: Any, batch: Any, result: Any, *args: Any) -> None:
    """After the result of a round is settled: count it, and tell of each request's part in it."""
    recorder, step, begun, verified = getattr(result, "dspark", (None, None, 0.0, 0.0))
    if recorder is None or step is None:
        return
    now = time.perf_counter()
    drafts, bonus = step["drafts"].tolist(), step["bonus"].view(-1).tolist()
    accepted = step["commits"].cpu().numpy().astype(np.int64) - 1
    block = recorder.tally.block
    rows = np.full_like(accepted, block + 1) if step["rows"] is None else step["rows"][: len(accepted)].cpu().numpy()
    scheduled = np.maximum(rows.astype(np.int64) - 1, accepted)
    confidence = None if step["confidence"] is None else step["confidence"].cpu().numpy()
    recorder.tally.add(scheduled, accepted, confidence)
    for row, request in enumerate(batch.reqs):
        told = {
            "drafted": tuple(drafts[row]),
            "confidence": () if confidence is None else tuple(confidence[row].tolist()),
            "scheduled": int(scheduled[row]),
            "accepted": int(accepted[row]),
            "next_token": bonus[row],
        }
        recorder.tell(request, told, verified - begun, now - verified)
