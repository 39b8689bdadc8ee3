"""Footprints of models that are not here, from their published shapes: `configs/shapes/NAME.toml`.

A file holds the fields of the model's configuration, and its tensors as `"name" = "TYPE AxB"`, where `{0-3,5}` in a
name stands for each of these numbers; a `[draft]` in the same form. It becomes a listing like that of a file's header.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from local_runner.footprint import DraftPrint, Footprint
from local_runner.footprint.caches import caches
from local_runner.footprint.listing import Stored, of_draft, parts
from local_runner.footprint.read import footprint
from local_runner.pairs import config_root, user_config_root
from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.errors import InputError
from sglang_dspark.toml import read_toml

BITS = {"F32": 32.0, "BF16": 16.0, "F16": 16.0, "I64": 64.0, "I32": 32.0, "F8_E4M3": 8.0, "MXFP4": 4.25}
"""Of an element; MXFP4 has an 8-bit scale for each 32."""
NUMBERS = re.compile(r"\{([\d,-]+)\}")
SHAPE = re.compile(r"(\w+) (\d+(?:x\d+)*)")


def shape_files() -> dict[str, Path]:
    """The file of every published shape by its name, sorted by name."""
    found = {
        file.stem: file
        for root in (config_root(), user_config_root())
        for file in sorted((root / "shapes").glob("*.toml"))
    }
    return dict(sorted(found.items()))


def published(name: str) -> Footprint:
    """The footprint of a known shape. Raises InputError that names the file and the key at fault."""
    file = shape_files()[name]
    data = read_toml(file)
    try:
        draft = data.get("draft")
        return footprint(
            str(data["name"]),
            data["config"],
            _listing(data["tensors"], str(file)),
            round(float(data["largest_file_gb"]) * 1e9),
            draft=None if draft is None else _draft(draft, str(file)),
            notes=("From published shapes, not from files.", *map(str, data["estimated"])),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} lacks or misspells {error}; correct the file.") from error


def _draft(data: dict[str, Any], where: str) -> DraftPrint:
    fields = Fields(data["config"], where)
    found = parts(_listing(data["tensors"], where), of_draft)
    return DraftPrint(
        name=str(data["name"]),
        parts=found,
        caches=caches(fields, fields.integer("num_hidden_layers")),
        block=fields.integer("block_size"),
        taps=fields.integer("taps"),
        rank=fields.integer("markov_rank"),
        shares_lm_head=not any(part.kind == "draft lm_head" for part in found),
    )


def _listing(tensors: dict[str, str], where: str) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for pattern, text in tensors.items():
        match = SHAPE.fullmatch(text)
        if match is None or match[1] not in BITS:
            raise InputError(f"{where}: '{pattern}' is '{text}', but must be a type and axes, such as BF16 64x32.")
        elements = math.prod(int(axis) for axis in match[2].split("x"))
        for name in _expanded(pattern):
            found[name] = Stored(match[1], elements, round(elements * BITS[match[1]] / 8))
    return found


def _expanded(pattern: str) -> list[str]:
    match = NUMBERS.search(pattern)
    if match is None:
        return [pattern]
    names = []
    for item in match[1].split(","):
        first, _, last = item.partition("-")
        names += [pattern.replace(match[0], str(i)) for i in range(int(first), int(last or first) + 1)]
    return names
