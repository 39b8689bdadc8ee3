"""Training text from the target itself: it writes the user's turn after a few opening words, and then the answer.

Every conversation has a number, and its domain, opening and temperatures follow from the seed and that number, so that
the work can be shared out, stopped and taken up again. A target without a chat template answers nobody: its texts begin
with a few random tokens.
"""

from __future__ import annotations

import hashlib
import random
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.errors import InputError
from sglang_dspark.training.batched import Decoder
from sglang_dspark.training.conversations import Conversation

OPENINGS = Path(__file__).with_name("openings.toml")
MARKER = "⁂"
"""Stands for the user's text when the template is taken apart."""
MARGIN = 24
"""Tokens that an ending may have."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to make conversations. Temperatures are drawn from their lists, so that repeats weigh more."""

    seed: int = 0
    slots: int = 96
    prompt_tokens: int = 128
    answer_tokens: int = 192
    prompt_temperatures: tuple[float, ...] = (0.6, 0.8, 1.0)
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.8, 1.0, 1.0, 1.0)
    ending_share: float = 0.25
    shortest_prompt: int = 6
    distinct: float = 0.35
    """The least share of an answer's four-grams that must be distinct: less of it is a loop."""


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template with one user turn, taken apart into tokens."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    stops: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, stops: frozenset[int]) -> Template:
        """Raises InputError for a tokenizer without a chat template, or one that hides the user's text."""
        if not getattr(tokenizer, "chat_template", None):
            raise InputError("The target has no chat template, so it cannot write prompts; give some with --prompts.")
        message = [{"role": "user", "content": MARKER}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        if text.count(MARKER) != 1:
            raise InputError("The target's chat template hides the user's text; give prompts with --prompts.")
        before, after = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in text.split(MARKER))
        return cls(before, after, stops | {after[0]} if after else stops)


@dataclass(slots=True)
class Job:
    """A conversation in the making: `tokens` so far, of which `fed` have been through the target."""

    number: int
    domain: str
    temperatures: tuple[float, float]
    ending: tuple[int, ...]
    tokens: list[int]
    fed: int = 0
    turn: int = 0
    """Where the user's turn began, or the answer did."""
    answer: int = 0


@dataclass(slots=True)
class Statistics:
    """What was made and what was dropped, by reason."""

    conversations: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0
    domains: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


class Synthesis:
    """Keeps the slots of a decoder busy with conversations and hands over those that pass the filters."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any,
        template: Template | None,
        settings: Settings,
        numbers: range,
        prompts: Sequence[tuple[str, Sequence[int]]] = (),
        seen: Iterable[bytes] = (),
        stops: frozenset[int] = frozenset(),
    ) -> None:
        """`numbers` are the conversations to make, in order. With `prompts`, (domain, tokens of a whole prompt) each,
        number n answers one of them; `seen` holds keys of prompts that there are already.

        Raises InputError where conversations are longer than the decoder's capacity.
        """
        self.decoder, self.tokenizer, self.template, self.settings = decoder, tokenizer, template, settings
        self.numbers, self.prompts, self.seen = iter(numbers), prompts, set(seen)
        self.statistics = Statistics()
        with OPENINGS.open("rb") as file:
            self.openings = tomllib.load(file)
        self.domains = sorted(d for d in self.openings if d != "endings")
        self.uniforms = torch.Generator().manual_seed(settings.seed * 1_000_003 + numbers.start)
        longest = max((len(tokens) for _, tokens in prompts), default=settings.prompt_tokens)
        around = len(template.before) + len(template.after) if template else 0
        need = around + longest + settings.answer_tokens + MARGIN
        if need > decoder.capacity:
            raise InputError(
                f"Conversations of {need} tokens do not fit the target's context of {decoder.capacity}; ask for shorter"
                " prompts and answers."
            )
        self.stops = template.stops if template else stops
        self.prefix = template.before if template and not prompts else ()
        self.jobs: list[Job] = []

    def run(self, keep: Callable[[Conversation], None], cancelled: threading.Event) -> None:
        """Make conversations until `cancelled`, or until all numbers are begun and done."""
        self.jobs = [self._job(slot) for slot in range(self.decoder.slots)]
        while not cancelled.is_set() and any(job.number >= 0 for job in self.jobs):
            logits = self.decoder.step(torch.tensor([job.tokens[job.fed] for job in self.jobs]))
            waiting = []
            for slot, job in enumerate(self.jobs):
                job.fed += 1
                if job.fed == len(job.tokens):
                    waiting.append(slot)
            self._extend(logits, waiting, keep)

    def _job(self, slot: int) -> Job:
        """Begin the next conversation in `slot`; number -1 where none is left keeps it busy for nothing."""
        number = next(self.numbers, -1)
        rng = random.Random(f"{self.settings.seed}/{number}")
        answer_temperature = rng.choice(self.settings.answer_temperatures)
        self.decoder.restart(slot, self.prefix)
        if self.prompts or self.template is None:
            domain, tokens = (
                self.prompts[number % len(self.prompts)] if self.prompts else ("text", self._random_tokens(rng))
            )
            return Job(number, domain, (0.0, answer_temperature), (), list(tokens), answer=len(tokens))
        domain = self.domains[number % len(self.domains)]
        opening = rng.choice(self.openings[domain]).replace("{n}", str(rng.randint(2, 99)))
        endings = self.openings["endings"].get(domain, [""])
        ending = rng.choice(endings) if rng.random() < self.settings.ending_share else ""
        before = len(self.prefix)
        return Job(
            number,
            domain,
            (rng.choice(self.settings.prompt_temperatures), answer_temperature),
            self._tokens(ending),
            [*self.prefix, *self._tokens(opening)],
            fed=before,
            turn=before,
        )

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _random_tokens(self, rng: random.Random) -> list[int]:
        vocab = self.decoder.model.get_output_embeddings().weight.shape[0]
        return [rng.randrange(vocab) for _ in range(rng.randint(2, 8))]

    def _extend(self, logits: Tensor, waiting: Sequence[int], keep: Callable[[Conversation], None]) -> None:
        """Give every job in a slot of `waiting` its next token, or what follows a finished turn."""
        if not waiting:
            return
        temperatures = torch.tensor([self.jobs[slot].temperatures[self.jobs[slot].answer > 0] for slot in waiting])
        for slot, token in zip(waiting, draw(logits[waiting], temperatures, self.uniforms), strict=True):
            job = self.jobs[slot]
            ended = token in self.stops
            if job.answer == 0:
                if ended:
                    self._end_prompt(slot, job)
                elif len(job.tokens) - job.turn >= self.settings.prompt_tokens:
                    self._replace(slot, "long prompt")
                else:
                    job.tokens.append(token)
                continue
            job.tokens.append(token)
            if ended or len(job.tokens) - job.answer >= self.settings.answer_tokens:
                self._end_answer(slot, job, keep)

    def _end_prompt(self, slot: int, job: Job) -> None:
        prompt = job.tokens[job.turn :]
        text = self.tokenizer.decode(prompt)
        key = prompt_key(text)
        foreign = sum(ord(c) > 0x24F for c in text) / max(1, len(text))
        if len(prompt) < self.settings.shortest_prompt:
            return self._replace(slot, "short prompt")
        if foreign > 0.1:
            return self._replace(slot, "other language")
        if key in self.seen:
            return self._replace(slot, "duplicate")
        if distinct_share(prompt) < self.settings.distinct:
            return self._replace(slot, "loop in prompt")
        self.seen.add(key)
        assert self.template is not None, "only templates have a user's turn"
        job.tokens += [*job.ending, *self.template.after]
        job.answer = len(job.tokens)

    def _end_answer(self, slot: int, job: Job, keep: Callable[[Conversation], None]) -> None:
        answer = job.tokens[job.answer :]
        if job.number < 0:
            return self._replace(slot, None)
        if len(answer) < 8:
            return self._replace(slot, "short answer")
        if distinct_share(answer) < self.settings.distinct:
            return self._replace(slot, "loop in answer")
        keep(Conversation(job.number, job.domain, job.temperatures[1], job.answer, tuple(job.tokens)))
        self.statistics.conversations += 1
        self.statistics.answer_tokens += len(answer)
        self.statistics.prompt_tokens += job.answer
        self.statistics.domains[job.domain] += 1
        self._replace(slot, None)

    def _replace(self, slot: int, dropped: str | None) -> None:
        if dropped is not None:
            self.statistics.dropped[dropped] += 1
        self.jobs[slot] = self._job(slot)


def prompt_key(text: str) -> bytes:
    """What makes two prompts the same: their words."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).digest()


def draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> list[int]:
    """A token for each row of `logits` [n, V] at its temperature [n]; 0 takes the likeliest."""
    tokens = logits.argmax(-1)
    temperatures = temperatures.to(logits.device)
    sampled = temperatures > 0
    if sampled.any():
        scaled = torch.softmax(logits[sampled] / temperatures[sampled, None], -1).cumsum_(-1)
        u = torch.rand(len(scaled), 1, generator=generator).to(scaled) * scaled[:, -1:]
        tokens[sampled] = torch.searchsorted(scaled, u, right=True).squeeze(1).clamp_max(logits.shape[1] - 1)
    chosen: list[int] = tokens.tolist()
    return chosen


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """How many of the n-grams of `tokens` are distinct, of all: 1 for text without repetition."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
