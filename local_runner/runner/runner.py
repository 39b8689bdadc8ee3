"""An engine around an engine, which drafts what has paid so far."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from local_runner.engine import Message, TextStream
from local_runner.engines.base import Request
from local_runner.engines.lookup import BLOCK, LookupEngine
from local_runner.engines.torch.engine import TorchEngine
from local_runner.runner.drafter import Mixed
from local_runner.runner.profile import Profile
from sglang_dspark.decoding.adaptive import Adaptive, Policy
from sglang_dspark.decoding.lookup import Lookup
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.schedule import CostCurve


class Runner:
    """Decodes as the `engine` within does; with the schedule `Adaptive` it drafts with its head, by prompt look-up or
    not at all, whatever promises most. What it learns is kept from request to request.
    """

    def __init__(self, engine: TorchEngine, profile: Profile, reason: str = "") -> None:
        """`profile` says what the engine's rounds cost, `reason` why it was chosen."""
        self.engine, self.profile, self.reason = engine, profile, reason
        self.block = engine.block or BLOCK
        lookup = Lookup()
        self.policy = Policy(profile.costs(), self.block, head=engine.drafter is not None, longest=lookup.longest)
        self.mixed = Mixed(self.policy, engine.drafter, self.block, lookup)
        self.notes: Sequence[str] = (*engine.notes, reason) if reason else engine.notes

    @property
    def has_confidence(self) -> bool:
        """Whether the draft judges its own tokens."""
        return self.engine.has_confidence

    @property
    def adapts(self) -> bool:
        """It decodes with the schedule `Adaptive`."""
        return True

    @property
    def reuse_prefix(self) -> bool:
        """Whether a request keeps what the caches hold of its prompt."""
        return self.engine.reuse_prefix

    @reuse_prefix.setter
    def reuse_prefix(self, reuse: bool) -> None:
        self.engine.reuse_prefix = reuse

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self.engine.stop_ids

    @property
    def description(self) -> dict[str, Any]:
        """The engine's, with what rounds cost, the reason for the choice, and what became of drafts so far."""
        return self.engine.description | {
            "draft": self.engine.description.get("draft") or "prompt look-up",
            "runner": {"reason": self.reason, "profile": self.profile.to_dict(), "sources": self.statistics()},
        }

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None if it has none."""
        return self.engine.tokenizer

    def statistics(self) -> dict[str, dict[str, int]]:
        """By source ("plain", "head", "lookup"): rounds, and the tokens drafted, scheduled and accepted in them."""
        return {source: asdict(tally) for source, tally in self.mixed.tallies.items()}

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation in the target's chat template, ready for the answer."""
        return self.engine.encode_chat(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self.engine.decode(ids)

    def text_stream(self) -> TextStream:
        """A new incremental detokeniser."""
        return self.engine.text_stream()

    def generate(self, request: Request, cancelled: threading.Event | None = None) -> Iterator[Round]:
        """Decode one request; setting `cancelled` ends it between rounds."""
        if not isinstance(request.schedule, Adaptive):
            yield from self.engine.generate(request, cancelled)
            return
        engine, target = self.engine, self.engine.target
        drafter, taps = engine.drafter, target.taps

        def leave() -> None:
            target.taps = ()  # nobody reads them any more

        following = self.policy.begin()
        # A look-up draft was not drawn from a distribution, which verifying sampled drafts asks for.
        drawn = request.draft_style == "sampled" and not request.sampling.greedy
        room = target.context_length
        self.mixed.begin(request.prompt_ids, room=room, lookup=not drawn, following=following, leave=leave)
        engine.drafter = self.mixed
        try:
            if not following:
                leave()
            yield from engine.generate(replace(request, schedule=self.mixed), cancelled)
        finally:
            engine.drafter, target.taps = drafter, taps

    def margin(self, prompt_ids: Sequence[int], output_prefix_ids: Sequence[int]) -> tuple[int, int, float]:
        """The target's two best tokens after this prefix, and how far apart their logits are."""
        return self.engine.margin(prompt_ids, output_prefix_ids)

    def width_noise(self, ids: Sequence[int]) -> float:
        """The greatest difference in logits between the last of `ids` decoded alone and within γ + 1 rows."""
        return (self.engine if self.engine.block else LookupEngine(self.engine)).width_noise(ids)

    def cost_curve(self) -> CostCurve:
        """Measured seconds of a round against the rows that it verifies."""
        return self.profile.curve
