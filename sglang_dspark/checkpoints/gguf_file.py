"""GGUF files: a bounded reader of headers that may be hostile, and a writer that streams.

A file is `GGUF`, a version, the counts of tensors and fields, the fields, the tensors' names, axes (last first), types
and offsets, then, aligned, their data. Little-endian versions 2 and 3 are read; 3 is written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, BinaryIO, NoReturn

import gguf
import numpy as np
import torch

from sglang_dspark.checkpoints.outputs import OutTensor
from sglang_dspark.checkpoints.places import Source
from sglang_dspark.checkpoints.tensors import MAX_AXIS, Packing, TensorInfo
from sglang_dspark.checkpoints.words import brief
from sglang_dspark.errors import InputError

MAGIC = b"GGUF"
MAX_HEADER = 200_000_000
"""Bytes of a header. The largest tokenizers take about 20 MB."""
MAX_COUNT = 100_000
"""Fields, and tensors."""
MAX_DEPTH = 4
"""Arrays inside arrays."""
LONG = 1024
"""Arrays longer than this are walked but not kept: they are tokenizers' tables."""
WINDOW = 1 << 20
ALIGNMENT = 32


class Kind(IntEnum):
    """The type of a field's value, as GGUF numbers it."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS = {
    Kind.UINT8: "<B", Kind.INT8: "<b", Kind.UINT16: "<H", Kind.INT16: "<h", Kind.UINT32: "<I", Kind.INT32: "<i",
    Kind.FLOAT32: "<f", Kind.BOOL: "<?", Kind.UINT64: "<Q", Kind.INT64: "<q", Kind.FLOAT64: "<d",
}  # fmt: skip
PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class Long:
    """An array that was walked and not kept: how many items it has."""

    count: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """A read header. `spans` are the bytes of each field, from its key to the end of its value."""

    fields: Mapping[str, Any]
    spans: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, TensorInfo]


class _Cursor:
    """Reads a source from its start in windows, so that a header on a hub costs few requests."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.size = source.size
        self.position = 0
        self._start, self._data = 0, b""

    def fail(self, why: str) -> NoReturn:
        raise InputError(f"{self.source.name} is no sound GGUF file: {why}; fetch it again.")

    def take(self, count: int) -> bytes:
        first = self.position - self._start
        if first + count > len(self._data):
            if count > self.size - self.position:
                self.fail(f"its header ends at byte {self.size}")
            if self.position + count > MAX_HEADER:
                self.fail(f"its header has more than {MAX_HEADER} bytes")
            self._start, first = self.position, 0
            self._data = self.source.read(self.position, min(max(count, WINDOW), self.size - self.position))
        self.position += count
        return self._data[first : first + count]

    def skip(self, count: int) -> None:
        if count > self.size - self.position:
            self.fail(f"its header ends at byte {self.size}")
        self.position += count

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def bytes(self) -> bytes:
        return self.take(self.number("<Q"))

    def text(self) -> str:
        try:
            return self.bytes().decode()
        except UnicodeDecodeError:
            self.fail("it holds text that is not UTF-8")

    def kind(self) -> Kind:
        number = self.number("<I")
        if number not in Kind._value2member_map_:
            self.fail(f"it holds a field of the unknown type {number}")
        return Kind(number)

    def value(self, kind: Kind, depth: int = 0) -> Any:
        if kind is Kind.STRING:
            return self.text()
        if kind is not Kind.ARRAY:
            return self.number(SCALARS[kind])
        if depth == MAX_DEPTH:
            self.fail(f"it nests arrays more than {MAX_DEPTH} deep")
        item, count = self.kind(), self.number("<Q")
        if count > MAX_HEADER:
            self.fail(f"it holds an array of {count} items")
        if count <= LONG:
            return [self.value(item, depth + 1) for _ in range(count)]
        if item in SCALARS:
            self.skip(count * struct.calcsize(SCALARS[item]))
        else:
            for _ in range(count):
                self.bytes() if item is Kind.STRING else self.value(item, depth + 1)
        return Long(count)


def parse_gguf(source: Source) -> Gguf:
    """Read the header of a GGUF file, and nothing else. Raises InputError that says what is wrong with it."""
    cursor = _Cursor(source)
    if cursor.size < 24 or cursor.take(4) != MAGIC:
        raise InputError(f"{source.name} does not begin as a GGUF file does; fetch it again.")
    version = cursor.number("<I")
    if version not in (2, 3):
        cursor.fail(f"its version is {version}, not 2 or 3 in little-endian order")
    tensors, count = cursor.number("<Q"), cursor.number("<Q")
    if max(tensors, count) > MAX_COUNT:
        cursor.fail(f"it claims {tensors} tensors and {count} fields")
    fields: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(count):
        start = cursor.position
        key = cursor.text()
        if key in fields:
            cursor.fail(f"it holds the field {brief(key)} twice")
        fields[key] = cursor.value(cursor.kind())
        spans[key] = (start, cursor.position)
    entries = [_tensor(cursor) for _ in range(tensors)]
    alignment = fields.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment > 1 << 20:
        cursor.fail(f"its alignment is {brief(alignment)}")
    base = _aligned(cursor.position, alignment)
    return Gguf(fields, spans, _place(cursor, entries, base, alignment))


_Entry = tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]


def _tensor(cursor: _Cursor) -> _Entry:
    name, axes = cursor.text(), cursor.number("<I")
    if axes > 4:
        cursor.fail(f"its tensor {brief(name)} has {axes} axes")
    shape = tuple(reversed([cursor.number("<Q") for _ in range(axes)]))
    number, offset = cursor.number("<I"), cursor.number("<Q")
    if any(n > MAX_AXIS for n in shape):
        cursor.fail(f"its tensor {brief(name)} has the shape {list(shape)}")
    try:
        return name, shape, gguf.GGMLQuantizationType(number), offset
    except ValueError:
        cursor.fail(f"its tensor {brief(name)} has the unknown type {number}")


def _place(cursor: _Cursor, entries: list[_Entry], base: int, alignment: int) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    end = 0
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        block, size = map(int, gguf.GGML_QUANT_SIZES[kind])
        if name in found:
            cursor.fail(f"it holds the tensor {brief(name)} twice")
        if offset < end or offset % alignment:
            cursor.fail(f"its tensor {brief(name)} overlaps its neighbour or is not aligned")
        if (shape[-1] if shape else 1) % block:
            cursor.fail(f"a row of its tensor {brief(name)} is no multiple of {block}")
        end = offset + math.prod(shape) // block * size
        if base + end > cursor.size:
            cursor.fail(f"it is truncated: its tensor {brief(name)} ends at byte {base + end} of {cursor.size}")
        packing = None if kind.name in PLAIN else _packing(kind)
        dtype = PLAIN.get(kind.name, torch.float32)
        found[name] = TensorInfo(dtype, shape, cursor.source, base + offset, packing)
    return found


def _packing(kind: gguf.GGMLQuantizationType) -> Packing:
    block, size = map(int, gguf.GGML_QUANT_SIZES[kind])

    def unpack(data: bytes) -> torch.Tensor:
        try:
            return torch.from_numpy(gguf.quants.dequantize(np.frombuffer(data, np.uint8), kind))
        except NotImplementedError:
            raise InputError(f"The GGUF quantisation {kind.name} cannot be unpacked; use F16, BF16 or Q8_0.") from None

    return Packing(kind.name, block, size, unpack)


def quantised(values: torch.Tensor, kind: str) -> bytes:
    """The bytes of float32 `values`, a multiple of 32 of them, in the GGUF type `kind`: F32, F16, BF16 or Q8_0."""
    if kind == "Q8_0":
        packed = gguf.quants.quantize(values.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        return bytes(packed.tobytes())
    return values.to(PLAIN[kind]).contiguous().view(torch.uint8).numpy().tobytes()


def stored_size(kind: str, count: int) -> int:
    """Bytes that `count` elements of the GGUF type `kind` take."""
    block, size = map(int, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]])
    return count // block * size


def encode(key: str, kind: Kind, value: Any, item: Kind = Kind.INT32) -> bytes:
    """The bytes of one field; `item` is the type of an array's items. Raises InputError if the type cannot hold it."""
    try:
        return _string(key) + struct.pack("<I", kind) + _encoded(kind, value, item)
    except (struct.error, OverflowError) as error:
        raise InputError(f"'{key}' would be {brief(value)}, which a GGUF field of {kind.name} cannot hold.") from error


def _encoded(kind: Kind, value: Any, item: Kind) -> bytes:
    if kind is Kind.ARRAY:
        return struct.pack("<IQ", item, len(value)) + b"".join(_encoded(item, v, item) for v in value)
    return _string(value) if kind is Kind.STRING else struct.pack(SCALARS[kind], value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def write_gguf(stream: BinaryIO, fields: Sequence[bytes], tensors: Sequence[OutTensor]) -> Iterator[bytes]:
    """Write a whole file of encoded `fields` and `tensors`, yielding each piece of data once it is written."""
    header = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(fields)), *fields]
    offset = 0
    for tensor in tensors:
        number = gguf.GGMLQuantizationType[tensor.kind]
        axes = [struct.pack("<Q", n) for n in reversed(tensor.shape)]
        header += [_string(tensor.name), struct.pack("<I", len(axes)), *axes, struct.pack("<IQ", number, offset)]
        offset += _aligned(tensor.size, ALIGNMENT)
    text = b"".join(header)
    stream.write(text + bytes(_aligned(len(text), ALIGNMENT) - len(text)))
    for tensor in tensors:
        for data in tensor.data:
            stream.write(data)
            yield data
        stream.write(bytes(_aligned(tensor.size, ALIGNMENT) - tensor.size))


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
