"""Evaluation tasks: JSONL files in DeepSpec's format, one conversation a line.

A line is `{"turns": ["…", …]}`, what the user says turn by turn. A `domain` (or `category`) groups lines across files;
an `id` may name the line, else its number does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_runner.prompts import Prompt
from sglang_dspark.errors import InputError

KEYS = ("turns", "id", "domain", "category")


@dataclass(frozen=True, slots=True)
class Task:
    """A named set of conversations. The domain of a prompt whose line has none is empty."""

    name: str
    prompts: tuple[Prompt, ...]


def read_tasks(files: str, limit: int | None = None) -> list[Task]:
    """The tasks of a comma-separated list of files, at most `limit` prompts of each, in their order.

    A task is named after its file. Raises InputError that names the file, and the line that is wrong.
    """
    paths = [Path(part.strip()) for part in files.split(",") if part.strip()]
    if not paths:
        raise InputError("--tasks names no file; give JSONL files, separated by commas.")
    tasks = [Task(path.stem, tuple(_prompts(path)[:limit])) for path in paths]
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"Two tasks are called '{twice}'; rename one of the files.")
    return tasks


def _prompts(path: Path) -> Sequence[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would also split at U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"The task {path} cannot be read ({reason}); give a JSONL file.") from error
    prompts = [
        _prompt(line, f"Line {number} of {path}", str(number))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise InputError(f'The task {path} holds no prompt; write {{"turns": ["…"]}}, one object a line.')
    return prompts


def _prompt(line: str, where: str, number: str) -> Prompt:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long a number"
        raise InputError(f"{where} is not JSON ({reason}); write one JSON object a line.") from error
    turns = data.get("turns") if isinstance(data, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise InputError(f'{where} needs \'turns\', a list of texts that are not empty: {{"turns": ["…"]}}.')
    if unknown := [key for key in data if key not in KEYS]:
        raise InputError(f"{where} has the unknown key '{unknown[0]}'; the keys are {', '.join(KEYS)}.")
    if "domain" in data and "category" in data:
        raise InputError(f"{where} has both 'domain' and 'category', which mean the same; drop one.")
    names = {key: data[key] for key in KEYS[1:] if key in data}
    for key, value in names.items():
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            raise InputError(f"{where} has a '{key}' that is not text; write a short name.")
    domain = names.get("domain", names.get("category", ""))
    return Prompt(str(names.get("id", number)), str(domain), tuple(turns))
