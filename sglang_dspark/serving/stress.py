"""Requests under which a drafted answer would part from a plain one if anything were wrong."""

from __future__ import annotations

import random
from typing import Any

from sglang_dspark.serving.client import Ask, Client

LONGEST = 2048
"""Tokens of a long prompt, and the longest context whose end is tried."""
AT_END, END = "the context's end", 24
"""Requests whose answers end with the context, and the tokens that are left there."""
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"},'
    ' "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3}}, "required": ["name", "age"]}'
)
SPARE = 8
"""Tokens of a context that SGLang does not give to a prompt."""
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that merges two sorted lists.",
    "Tom has 3 boxes of 12 pencils and gives away 7. How many are left?",
    "한국의 수도는 어디인가요?",
)


def requests(client: Client, tokens: int) -> list[Ask]:
    """The requests, each of at most `tokens` greedy tokens, as the server's tokenizer and context allow."""
    context, dice = client.context(), random.Random(0)
    names = ["".join(dice.choices("abcdefxyz_0123456789", k=9)) for _ in range(12)]
    code = "".join(f"def f_{n}(a_{n}, b_{n}):\n    return a_{n} + b_{n}\n\n" for n in names)
    filler = " ".join(f"On day {n} the {dice.choice(names)} weighed {dice.randrange(999)} grams." for n in range(200))
    shared = "You are a careful clerk. Answer with a list of every item that was named, and nothing else. " * 2
    room = max(context - tokens - SPARE, 1)
    asks: list[Ask] = []

    def add(kind: str, texts: list[str], cut: int = room, **sampling: Any) -> None:
        for ids in client.tokenise(texts):
            asks.append(Ask(kind, ids[-cut:], {"max_new_tokens": tokens, **sampling}))

    add("questions", list(QUESTIONS))
    add("copying", [f"Repeat this code exactly.\n{code}{code[:n]}" for n in (0, 40, 97)], min(room, LONGEST))
    add("shared prefix", [shared + f"The items are {n} and {m}." for n, m in zip(names[:4], names[4:8], strict=True)])
    add("long", [filler, filler[300:]], min(room, LONGEST))
    if context <= LONGEST:
        for ids in client.tokenise([filler * (1 + context // 200), code * (1 + context // 50)]):
            asks.append(Ask(AT_END, ids[: context - END], {"max_new_tokens": END - 1}))
    add("a JSON grammar", ["Describe a cat as JSON."], json_schema=SCHEMA, ignore_eos=False)
    return asks
