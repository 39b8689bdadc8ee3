"""Reading tensors from a folder of safetensors files that may be damaged or hostile.

Headers are checked whole before any weight is read: bounded size, no duplicate names, offsets that tile the data
exactly. An index may only name files that lie in the folder itself. Pickled checkpoints can run code when they are
read: never opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sglang_dspark.errors import InputError

MAX_JSON = 100_000_000
"""Bytes. The safetensors library's own limit for a header, used for every JSON document of a checkpoint."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path


class Tensors(Mapping[str, TensorInfo]):
    """The tensors of a folder by name; `load` reads one."""

    def __init__(self, folder: Path, entries: dict[str, TensorInfo]) -> None:
        self.folder = folder
        self._entries = entries

    def __getitem__(self, name: str) -> TensorInfo:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def load(self, name: str) -> torch.Tensor:
        """The tensor `name` as stored, on the CPU, maybe a view of its file. Raises InputError if it is unreadable."""
        file = self[name].file
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"Cannot read '{name}' from {file}: {error}; fetch the file again.") from error
        return tensor


def open_tensors(folder: Path) -> Tensors:
    """List the tensors of `folder`, which holds model.safetensors, or shards and model.safetensors.index.json.

    Raises InputError for a folder with neither, with pickles only, or with a file that is not sound.
    """
    if not folder.is_dir():
        raise InputError(f"There is no checkpoint folder {folder}; give the folder that holds config.json.")
    if (folder / SINGLE).is_file():
        return Tensors(folder, read_header(folder / SINGLE))
    if (folder / INDEX).is_file():
        return Tensors(folder, _read_shards(folder / INDEX))
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)
    if pickles:
        raise InputError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when read;"
            " convert them to safetensors."
        )
    raise InputError(f"{folder} holds neither {SINGLE} nor {INDEX}; give the folder of a safetensors checkpoint.")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`. Raises InputError if it is absent, too large, malformed or repeats a key."""
    if not path.is_file():
        raise InputError(f"There is no {path.name} in {path.parent}; give the folder of a complete checkpoint.")
    if path.stat().st_size > MAX_JSON:
        raise InputError(
            f"{path} has more than {MAX_JSON} bytes, which no such file needs; fetch the checkpoint again."
        )
    return _parse_object(path.read_bytes(), f"{path}")


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The checked header of one safetensors file. Raises InputError that says what is wrong with it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise InputError(f"{file} ends inside its header; it is truncated or no safetensors file, fetch it again.")
        if length > MAX_JSON:
            raise InputError(f"{file} claims a header of {length} bytes, over the limit of {MAX_JSON}; do not use it.")
        header = _parse_object(stream.read(length), f"the header of {file}")
    header.pop("__metadata__", None)
    return _check_entries(header, file, size - 8 - length)


def _check_entries(header: dict[str, Any], file: Path, available: int) -> dict[str, TensorInfo]:
    entries: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if all(
                type(n) is int and n >= 0 for n in shape
            ):
                pass
            case _:
                raise InputError(f"'{name}' in {file} has a malformed header entry; fetch the file again.")
        if dtype not in DTYPES:
            raise InputError(
                f"'{name}' in {file} is stored as {dtype}, which is not supported; convert it to BF16 or F32."
            )
        if end > available and start <= end:
            raise InputError(f"{file} is truncated: '{name}' ends at byte {end} of {available}; fetch the file again.")
        if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise InputError(
                f"'{name}' in {file} spans {end - start} bytes, which is not {shape} of {dtype}; do not use it."
            )
        entries[name] = TensorInfo(DTYPES[dtype], tuple(shape), file)
        spans.append((start, end, name))
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            raise InputError(
                f"'{name}' in {file} overlaps its neighbour or leaves a gap at byte {position}; do not use it."
            )
        position = end
    if position != available:
        raise InputError(f"{file} has {available - position} bytes that belong to no tensor; do not use it.")
    return entries


def _read_shards(index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index} has no 'weight_map' from tensor names to file names; fetch it again.")
    found: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        # A bare name: a path, absolute or with "..", could reach any file of the machine.
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise InputError(f"{index} names '{shard}', which is not a safetensors file of this folder; do not use it.")
        if not (index.parent / shard).is_file():
            raise InputError(f"{index} names '{shard}', which is missing; fetch the checkpoint again.")
        for name, info in read_header(index.parent / shard).items():
            if name in found:
                raise InputError(
                    f"'{name}' is both in {found[name].file.name} and in {shard} of {index.parent}; keep one."
                )
            found[name] = info
    for name in sorted(weight_map.keys() | found.keys()):
        if name not in found or name not in weight_map or found[name].file.name != weight_map[name]:
            where = found[name].file.name if name in found else "no shard"
            raise InputError(
                f"{index} puts '{name}' in {weight_map.get(name, 'no shard')}, but it is in {where}; fetch it again."
            )
    return found


def _parse_object(data: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise InputError(f"{what} holds the key '{key}' twice; do not use it.")
            result[key] = value
        return result

    try:
        parsed = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{what} holds a {type(parsed).__name__} instead of an object; fetch it again.")
    return parsed
