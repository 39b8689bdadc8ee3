"""The prompts of a race: thirty of our own, or a JSONL file.

A line is `{"prompt": "…"}` or `{"turns": ["…", …]}`, with an optional `id` (else the line's number) and
`domain` (else the file's name). A domain is a kind of text that
is summarised on its own, because drafts are accepted far more often in code and maths than in conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sglang_dspark.errors import InputError

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
KEYS = {"id", "domain", "prompt", "turns"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation: what the user says, turn by turn. Token ids instead of text bypass template and tokenizer."""

    id: str
    domain: str
    turns: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()


def read_prompts(path: Path = BUILT_IN) -> list[Prompt]:
    """Read a JSONL file of prompts. Raises InputError that names the line which is wrong; blank lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would also split at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"The prompts file {path} cannot be read ({_reason(error)}); give a JSONL file in UTF-8."
        ) from error
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _parse(line, f"Line {number} of {path}", {"id": str(number), "domain": path.stem})
        if prompt.id in seen:
            raise InputError(
                f"The id '{prompt.id}' on line {number} of {path} is already on line {seen[prompt.id]}; rename one."
            )
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"The prompts file {path} holds no prompt; write one JSON object a line.")
    return prompts


def take(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts in their order, taken from the domains in turn so that these keep equal parts."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    in_turn = [p for row in zip_longest(*by_domain.values()) for p in row if p is not None]
    kept = set(in_turn[:limit])
    return [p for p in prompts if p in kept]


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids from `1,2,3`. Raises InputError that names the first entry which is not a token id."""
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not (entry.isascii() and entry.isdigit() and len(entry) < 10):
            raise InputError(
                f"--prompt-ids has '{entry[:20]}' where a token id belongs; write whole numbers like 1,2,3."
            )
    return tuple(int(entry) for entry in entries)


def _parse(line: str, where: str, defaults: dict[str, str]) -> Prompt:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long a number"
        raise InputError(f"{where} is not JSON ({reason}); write one JSON object a line.") from error
    if not isinstance(data, dict):
        raise InputError(f'{where} is not a JSON object; write {{"prompt": "…"}} or {{"turns": ["…"]}}.')
    if unknown := sorted(data.keys() - KEYS):
        raise InputError(f"{where} has the unknown key '{unknown[0]}'; the keys are {', '.join(sorted(KEYS))}.")
    if ("prompt" in data) == ("turns" in data):
        raise InputError(f"{where} needs either 'prompt' or 'turns'.")
    turns = [data["prompt"]] if "prompt" in data else data["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise InputError(f"{where} has an empty prompt or one that is not text; every turn must be text.")
    named = defaults | {k: data[k] for k in ("id", "domain") if k in data}
    for key, value in named.items():
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            raise InputError(f"{where} has a '{key}' that is not text; write a short name.")
    return Prompt(id=str(named["id"]), domain=str(named["domain"]), turns=tuple(turns))


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"
