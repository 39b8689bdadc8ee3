"""What the commands ask of an engine, and what they tell it besides a prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError

if TYPE_CHECKING:
    from local_runner.engines.base import Request
    from sglang_dspark.decoding.sampling import SamplingParams
    from sglang_dspark.decoding.schedule import CostCurve, Schedule

Kind = Literal["torch", "gguf"]
Dtype = Literal["auto", "bfloat16", "float32", "float16"]
Device = Literal["auto", "cpu", "cuda", "mps"]
DraftStyle = Literal["greedy", "sampled"]
Mode = Literal["plain", "dspark"]
Message = dict[str, str]


class TextStream(Protocol):
    """Turns tokens into text as they come; holds back the bytes of a character that is not complete."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete."""


class Engine(Protocol):
    """A target, perhaps with a draft, that decodes requests."""

    @property
    def block(self) -> int:
        """γ, or 0 without a draft."""

    @property
    def has_confidence(self) -> bool:
        """Whether the draft judges its own tokens."""

    @property
    def adapts(self) -> bool:
        """Whether it decodes with the schedule `Adaptive`."""

    reuse_prefix: bool
    """Whether a request keeps what the caches hold of its prompt from those before it."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""

    @property
    def description(self) -> dict[str, Any]:
        """Engine, device, dtype, threads, versions, target and draft, for people and results."""

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about how the pair was loaded."""

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None if it has none."""

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation in the target's chat template, ready for the answer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""

    def text_stream(self) -> TextStream:
        """A new incremental detokeniser."""

    def generate(self, request: Request, cancelled: threading.Event | None = None) -> Iterator[Round]:
        """Decode one request; setting `cancelled` ends it between rounds."""

    def margin(self, prompt_ids: Sequence[int], output_prefix_ids: Sequence[int]) -> tuple[int, int, float]:
        """The target's two best tokens after this prefix, and how far apart their logits are."""

    def width_noise(self, ids: Sequence[int]) -> float:
        """The greatest difference in logits between the last of `ids` decoded alone and within γ + 1 rows."""

    def cost_curve(self) -> CostCurve:
        """Measured seconds of a step against the rows that it verifies."""


class TokenIds:
    """The text stream of a target without a tokenizer: the ids themselves, each after a space."""

    def push(self, tokens: Sequence[int]) -> str:
        """The ids of `tokens`."""
        return "".join(f" {token}" for token in tokens)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Everything about a request but its prompt."""

    max_new_tokens: int
    sampling: SamplingParams
    schedule: Schedule | None
    """None until `measured` has found one."""
    draft_style: DraftStyle = "greedy"
    stop_strings: tuple[str, ...] = ()

    def request(self, engine: Engine, prompt_ids: Sequence[int], mode: Mode, name: str) -> Request:
        """The request that decodes `prompt_ids` plainly or with DSpark."""
        from local_runner.engines.base import Request
        from sglang_dspark.decoding.schedule import Fixed

        return Request(
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_ids=engine.stop_ids,
            stop_strings=self.stop_strings,
            schedule=(self.schedule or Fixed()) if mode == "dspark" else None,
            draft_style=self.draft_style,
            name=name,
        )

    def measured(self, engine: Engine) -> Decoding:
        """This, with the engine's cost curve where the schedule needs one.

        Where none is given, it is what has paid so far if the engine adapts, else Algorithm 1 for a draft with a
        confidence head, and whole blocks for others.
        """
        from sglang_dspark.decoding.adaptive import Adaptive
        from sglang_dspark.decoding.schedule import Algorithm1, Fixed

        if self.schedule is None and engine.adapts:
            return replace(self, schedule=Adaptive())
        if self.schedule is None:
            return replace(self, schedule=Algorithm1(engine.cost_curve()) if engine.has_confidence else Fixed())
        if isinstance(self.schedule, Algorithm1) and not engine.has_confidence:
            raise InputError("The schedule 'algorithm1' needs a draft with a confidence head; use --schedule fixed.")
        if isinstance(self.schedule, Algorithm1) and self.schedule.curve is None:
            return replace(self, schedule=Algorithm1(engine.cost_curve()))
        return self


def encode(engine: Engine, messages: list[Message]) -> tuple[int, ...]:
    """Token ids of a conversation. Raises InputError if the target has no tokenizer."""
    if engine.tokenizer is None:
        raise InputError("The target has no tokenizer, so it cannot read text; give the prompt with --prompt-ids.")
    return tuple(engine.encode_chat(messages))


def text_stream(engine: Engine) -> TextStream:
    """A new incremental detokeniser, or one that shows ids where the target has no tokenizer."""
    return TokenIds() if engine.tokenizer is None else engine.text_stream()
