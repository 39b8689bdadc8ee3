"""Reading tensors from safetensors files that may be damaged or hostile.

Headers are checked whole before any weight is read: bounded size, no duplicate names, offsets that tile the data
exactly. An index may only name files that lie beside it. Pickled checkpoints can run code when they are read: never
opened. Weights are read, not mapped: a mapped file counts as resident and doubles the peak while it is copied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.checkpoints.jsons import MAX_JSON, parse_object, read_json, read_object
from sglang_dspark.checkpoints.places import PICKLES, FileSource, Folder, Place, Source
from sglang_dspark.checkpoints.words import brief, cut
from sglang_dspark.errors import InputError

__all__ = [
    "MAX_JSON", "Later", "Readable", "TensorInfo", "Tensors", "Virtual", "list_tensors", "open_tensors", "read_header",
    "read_json",
]  # fmt: skip

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHUNK = 1 << 21
"""Elements read at once: a multiple of every block that a quantisation packs."""
MAX_AXES, MAX_AXIS, MAX_OFFSET = 8, 1 << 40, 1 << 62
"""Bounds that no weight comes near, so that the size of a shape is always quick to compute."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Packing:
    """A quantisation: each `block` elements take `size` bytes, and `unpack` turns bytes into float32 elements."""

    name: str
    block: int
    size: int
    unpack: Callable[[bytes], torch.Tensor]


class Readable(ABC):
    """A tensor that can be read in parts: what reading gives is `dtype`, in `shape`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Elements of a row: of the last axis."""
        return self.shape[-1] if self.shape else 1

    @abstractmethod
    def read(self, first: int, last: int) -> torch.Tensor:
        """Elements first..last-1 in one dimension; both are multiples of what a quantisation packs together."""

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows first..last-1 of a matrix [rows, columns]."""
        return self.read(first * self.columns, last * self.columns).view(last - first, self.columns)

    def chunks(self, size: int = CHUNK) -> Iterator[torch.Tensor]:
        """All elements in order, at most `size` at once, in one dimension."""
        for first in range(0, self.count, size):
            yield self.read(first, min(first + size, self.count))


@dataclass(frozen=True)
class TensorInfo(Readable):
    """Where one tensor lies and what it holds; `start` is its first byte in `source`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    source: Source
    start: int
    packing: Packing | None = None

    def read(self, first: int, last: int) -> torch.Tensor:
        """See `Readable.read`."""
        if first == last:
            return torch.empty(0, dtype=self.dtype)
        p = self.packing
        begin, end = (n // p.block * p.size if p else n * self.dtype.itemsize for n in (first, last))
        data = self.source.read(self.start + begin, end - begin)
        return p.unpack(data) if p else torch.frombuffer(bytearray(data), dtype=self.dtype)


class Virtual(Readable):
    """A matrix [rows, columns], or a vector as one row, whose rows are made when they are asked for."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[int, int], torch.Tensor]) -> None:
        """`make(first, last)` gives rows first..last-1."""
        self.dtype, self.shape, self._make = dtype, shape, make

    @classmethod
    def of(cls, vector: torch.Tensor) -> Virtual:
        """A vector that is in memory."""
        return cls(vector.dtype, tuple(vector.shape), lambda first, last: vector[None][first:last])

    def read(self, first: int, last: int) -> torch.Tensor:
        """See `Readable.read`."""
        if first == last:
            return torch.empty(0, dtype=self.dtype)
        row = first // self.columns
        made = self._make(row, -(-last // self.columns)).reshape(-1)
        return made[first - row * self.columns : last - row * self.columns]


class Tensors(Mapping[str, Readable]):
    """The tensors of a checkpoint by name; `load` reads one."""

    def __init__(self, folder: Path, entries: Mapping[str, Readable]) -> None:
        self.folder = folder
        self._entries = entries

    def __getitem__(self, name: str) -> Readable:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def load(self, name: str) -> torch.Tensor:
        """The tensor `name` on the CPU, unpacked if it is quantised. Raises InputError if it is unreadable."""
        info = self[name]
        result = torch.empty(info.count, dtype=info.dtype)
        done = 0
        try:
            for chunk in info.chunks():
                result[done : done + chunk.numel()] = chunk
                done += chunk.numel()
        except InputError as error:
            raise InputError(f"Cannot read '{name}': {error}") from error
        return result.view(info.shape)


class Later(Mapping[str, Readable]):
    """Tensors that are listed when they are first asked for: a configuration is judged before any weights are."""

    def __init__(self, listing: Callable[[], Mapping[str, Readable]]) -> None:
        self._listing = cache(listing)

    def __getitem__(self, name: str) -> Readable:
        return self._listing()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listing())

    def __len__(self) -> int:
        return len(self._listing())


def open_tensors(folder: Path) -> Tensors:
    """List the tensors of `folder`, which holds model.safetensors, or shards and model.safetensors.index.json.

    Raises InputError for a folder with neither, with pickles only, or with a file that is not sound.
    """
    if not folder.is_dir():
        raise InputError(f"There is no checkpoint folder {folder}; give the folder that holds config.json.")
    return Tensors(folder, list_tensors(Folder(folder)))


def list_tensors(place: Place, prefix: str = "") -> dict[str, TensorInfo]:
    """The tensors of `place` whose names begin with `prefix`; shards without such a tensor are not opened.

    Raises InputError as `open_tensors` does.
    """
    files = place.files()
    if SINGLE in files:
        found = parse_header(place.source(SINGLE))
    elif INDEX in files:
        found = _read_shards(place, prefix)
    else:
        pickles = [name for name in files if name.endswith(PICKLES)]
        if pickles:
            raise InputError(
                f"{place.name} holds only pickled weights ({pickles[0]}), which can run code when read;"
                " convert them to safetensors."
            )
        raise InputError(
            f"{place.name} holds neither {SINGLE} nor {INDEX}; give the folder of a safetensors checkpoint."
        )
    return {name: info for name, info in found.items() if name.startswith(prefix)}


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The checked header of one safetensors file. Raises InputError that says what is wrong with it."""
    return parse_header(FileSource(file))


def parse_header(source: Source) -> dict[str, TensorInfo]:
    """As `read_header`, from any source; reads the header's own bytes and no more."""
    size = source.size
    length = int.from_bytes(source.read(0, 8), "little") if size >= 8 else size
    if size < 8 or length > size - 8:
        raise InputError(
            f"{source.name} ends inside its header; it is truncated or no safetensors file, fetch it again."
        )
    if length > MAX_JSON:
        raise InputError(
            f"{source.name} claims a header of {length} bytes, over the limit of {MAX_JSON}; do not use it."
        )
    header = parse_object(source.read(8, length), f"the header of {source.name}")
    header.pop("__metadata__", None)
    return _check_entries(header, source, 8 + length)


def _check_entries(header: dict[str, Any], source: Source, base: int) -> dict[str, TensorInfo]:
    file, available = source.name, source.size - base
    entries: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        what = f"{brief(name)} in {file}"
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if (
                len(shape) <= MAX_AXES
                and all(type(n) is int and 0 <= n <= MAX_AXIS for n in shape)
                and max(abs(start), abs(end)) < MAX_OFFSET
            ):
                pass
            case _:
                raise InputError(f"{what} has a malformed header entry; fetch the file again.")
        if dtype not in DTYPES:
            raise InputError(
                f"{what} is stored as {cut(dtype, 40)}, which is not supported; convert it to BF16 or F32."
            )
        if end > available and start <= end:
            raise InputError(f"{file} is truncated: {brief(name)} ends at byte {end} of {available}; fetch it again.")
        if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise InputError(f"{what} spans {end - start} bytes, which is not {shape} of {dtype}; do not use it.")
        entries[name] = TensorInfo(DTYPES[dtype], tuple(shape), source, base + start)
        spans.append((start, end, name))
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            raise InputError(
                f"{brief(name)} in {file} overlaps its neighbour or leaves a gap at byte {position}; do not use it."
            )
        position = end
    if position != available:
        raise InputError(f"{file} has {available - position} bytes that belong to no tensor; do not use it.")
    return entries


def _read_shards(place: Place, prefix: str) -> dict[str, TensorInfo]:
    index = place.source(INDEX)
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{index.name} has no 'weight_map' from tensor names to file names; fetch it again.")
    wanted = {name: shard for name, shard in weight_map.items() if name.startswith(prefix)}
    files = frozenset(place.files())
    found: dict[str, TensorInfo] = {}
    for shard in sorted(set(wanted.values())):
        # A bare name: a path, absolute or with "..", could reach any file of the machine.
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise InputError(
                f"{index.name} names {brief(shard)}, which is not a safetensors file of this folder; do not use it."
            )
        if shard not in files:
            raise InputError(f"{index.name} names {brief(shard)}, which is missing; fetch the checkpoint again.")
        for name, info in parse_header(place.source(shard)).items():
            if name in found:
                raise InputError(
                    f"{brief(name)} is both in {found[name].source.file_name} and in {shard} of {place.name}; keep one."
                )
            if name.startswith(prefix):
                found[name] = info
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found or name not in wanted or found[name].source.file_name != wanted[name]:
            where = found[name].source.file_name if name in found else "no shard"
            said = cut(wanted.get(name, "no shard"))
            raise InputError(f"{index.name} puts {brief(name)} in {said}, but it is in {where}; fetch it again.")
    return found
