"""JSON documents of a checkpoint, read without trusting them: bounded, objects only, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_dspark.checkpoints.places import FileSource, Source
from sglang_dspark.checkpoints.words import brief, cut
from sglang_dspark.errors import InputError

MAX_JSON = 100_000_000
"""Bytes. The safetensors library's own limit for a header, used for every JSON document of a checkpoint."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`. Raises InputError if it is absent, too large, malformed or repeats a key."""
    if not path.is_file():
        raise InputError(f"There is no {path.name} in {path.parent}; give the folder of a complete checkpoint.")
    return read_object(FileSource(path))


def read_object(source: Source) -> dict[str, Any]:
    """The object in a JSON file. Raises InputError as `read_json` does."""
    size = source.size
    if size > MAX_JSON:
        raise InputError(
            f"{source.name} has more than {MAX_JSON} bytes, which no such file needs; fetch the checkpoint again."
        )
    return parse_object(source.read(0, size), source.name)


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The object that `data` holds; `what` names the document in errors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise InputError(f"{what} holds the key {brief(key)} twice; do not use it.")
            result[key] = value
        return result

    try:
        parsed = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not valid JSON ({cut(str(error))}); fetch it again.") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{what} holds a {type(parsed).__name__} instead of an object; fetch it again.")
    return parsed
