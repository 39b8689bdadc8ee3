"""Conversations to train on: shards of JSON lines in a folder, in the target's own tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_dspark.errors import InputError

MANIFEST = "synthesis.json"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One turn of a user and its answer: `tokens` in the target's template, of which those from `answer` on are the
    answer. `number` says which of a synthesis it is; `temperature` is the answer's, 0 being greedy.
    """

    number: int
    domain: str
    temperature: float
    answer: int
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < self.answer <= len(self.tokens):
            raise ValueError(f"an answer at {self.answer} is outside its {len(self.tokens)} tokens")


def shards(folder: Path) -> list[Path]:
    """The shards of a folder, in the order of their names. Raises InputError if there are none."""
    found = sorted(folder.glob("*.jsonl"))
    if not found:
        raise InputError(f"There are no conversations in {folder}; make some with: dspark synthesise.")
    return found


def read_shard(path: Path) -> Iterator[Conversation]:
    """The conversations of a shard. Raises InputError that names the line which is wrong."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                data = json.loads(line)
                yield Conversation(**{**data, "tokens": tuple(map(int, data["tokens"]))})
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(
                    f"{path}, line {number} is no conversation ({error}); make the shard again."
                ) from error


def write_shard(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write a shard, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(c)) + "\n" for c in conversations)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def is_held_out(conversation: Conversation, share: int) -> bool:
    """Whether a conversation is for evaluation: one in `share`, by its prompt, so that no prompt is on both sides."""
    prompt = ",".join(map(str, conversation.tokens[: conversation.answer])).encode()
    return int.from_bytes(hashlib.sha256(prompt).digest()[:4], "big") % share == 0
