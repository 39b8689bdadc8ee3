"""Conversations follow from their numbers, in the target's template, and what is bad is dropped by reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_dspark.errors import InputError
from sglang_dspark.training.batched import OneByOneDecoder
from sglang_dspark.training.conversations import Conversation
from sglang_dspark.training.synthesise import Settings, Synthesis, Template, distinct_share, draw, prompt_key

TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
SETTINGS = Settings(slots=3, prompt_tokens=12, answer_tokens=10, ending_share=0.0, shortest_prompt=1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{n}" for n in range(55))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


class Scripted:
    """A decoder whose next token is a function of the tokens of its slot."""

    def __init__(self, slots: int, say: Callable[[list[int]], int]) -> None:
        self.slots, self.capacity, self.say = slots, 96, say
        self.texts: list[list[int]] = [[] for _ in range(slots)]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.full((self.slots, 60), -100.0)
        for slot, token in enumerate(tokens.tolist()):
            self.texts[slot].append(token)
            logits[slot, self.say(self.texts[slot])] = 100.0
        return logits

    def restart(self, slot: int, prefix: tuple[int, ...]) -> None:
        self.texts[slot] = list(prefix)


def run(
    decoder: Any, tokenizer: Any, numbers: range, settings: Settings = SETTINGS, **more: Any
) -> tuple[Any, list[Conversation]]:
    made: list[Conversation] = []
    template = Template.of(tokenizer, frozenset([2])) if tokenizer else None
    synthesis = Synthesis(decoder, tokenizer, template, settings, numbers, **more)
    synthesis.run(made.append, threading.Event())
    return synthesis.statistics, made


def test_the_template_is_taken_apart(tokenizer: Any) -> None:
    made = Template.of(tokenizer, frozenset([2]))
    assert made.before == (1, 3) and made.after == (2, 1, 4) and 2 in made.stops


def counting(text: list[int]) -> int:
    """Ends the user's turn and the answer after eight tokens of each, all different."""
    turn = text[len(text) - text[::-1].index(1) + 1 :] if 1 in text else text
    return 2 if len(turn) >= 8 else 5 + (len(text) * 7) % 50


def test_conversations_are_in_the_template(tokenizer: Any) -> None:
    statistics, made = run(Scripted(3, counting), tokenizer, range(7))
    assert len({c.number for c in made}) == len(made) and len(made) + sum(statistics.dropped.values()) == 7
    assert made
    for c in made:
        assert c.tokens[:2] == (1, 3)
        assert c.tokens[c.answer - 3 : c.answer] == (2, 1, 4)
        assert c.tokens[-1] == 2 and 2 not in c.tokens[c.answer : -1]
        assert c.domain in ("chat", "code", "maths")
    assert statistics.answer_tokens == sum(len(c.tokens) - c.answer for c in made)


def test_the_same_number_is_the_same_conversation(llama: Any, tokenizer: Any) -> None:
    greedy = replace(SETTINGS, answer_temperatures=(0.0,), distinct=0.0)
    prompts = [("law", (1, 3, n, 2, 1, 4)) for n in range(20, 26)]
    _, together = run(OneByOneDecoder(llama, 3, 96), tokenizer, range(6), greedy, prompts=prompts)
    _, apart = run(OneByOneDecoder(llama, 2, 96), tokenizer, range(3, 6), greedy, prompts=prompts)
    assert {c.number: c for c in apart} == {c.number: c for c in together if c.number >= 3} and len(together) == 6


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (lambda text: 9, "long prompt"),
        (lambda text: 2, "short answer"),
        (lambda text: 9 if text.count(1) > 1 else counting(text), "loop in answer"),
    ],
)
def test_bad_ones_are_dropped_by_reason(tokenizer: Any, say: Callable[[list[int]], int], reason: str) -> None:
    statistics, made = run(Scripted(2, say), tokenizer, range(4))
    assert not made and statistics.dropped[reason] > 0


def test_a_prompt_is_answered_once(tokenizer: Any) -> None:
    _, made = run(Scripted(1, counting), tokenizer, range(3))
    seen = [prompt_key(tokenizer.decode(c.tokens[2 : c.answer - 3])) for c in made]
    again, none = run(Scripted(1, counting), tokenizer, range(3), seen=seen)
    assert made and not none and again.dropped["duplicate"] == len(made)


def test_given_prompts_are_answered(tokenizer: Any) -> None:
    _, made = run(
        Scripted(2, counting), tokenizer, range(2), prompts=[("law", (1, 3, 30, 2, 1, 4)), ("law", (1, 3, 31, 2, 1, 4))]
    )
    assert sorted(c.tokens[:6] for c in made) == [(1, 3, 30, 2, 1, 4), (1, 3, 31, 2, 1, 4)]
    assert {c.domain for c in made} == {"law"} and {c.answer for c in made} == {6}


def test_without_a_template_random_tokens_are_continued(llama: Any) -> None:
    _, made = run(
        OneByOneDecoder(llama, 2, 96),
        None,
        range(4),
        Settings(slots=2, prompt_tokens=12, answer_tokens=10, distinct=0.0),
    )
    assert {c.number for c in made} == set(range(4)) and all(2 <= c.answer <= 8 for c in made)


def test_a_template_that_hides_the_user_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template, before = "<s>", tokenizer.chat_template
    try:
        with pytest.raises(InputError, match="hides the user's text"):
            Template.of(tokenizer, frozenset())
    finally:
        tokenizer.chat_template = before


def test_draw_follows_each_rows_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20000, 3).contiguous()
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.5, 1.0):
        tokens = draw(logits, torch.full((20000,), temperature), generator)
        shares = torch.bincount(torch.tensor(tokens), minlength=3) / 20000
        torch.testing.assert_close(shares, (logits[0] / temperature).softmax(-1), atol=0.015, rtol=0)
    mixed = draw(logits[:2], torch.tensor([0.0, 1.0]), generator)
    assert mixed[0] == 2
    assert set(draw(logits, torch.zeros(20000), generator)) == {2}


def test_distinct_share_knows_a_loop() -> None:
    assert distinct_share([1, 2, 3, 4, 5, 6]) == 1.0
    assert distinct_share([1, 2] * 20) < 0.1
    assert distinct_share([1]) == 1.0
