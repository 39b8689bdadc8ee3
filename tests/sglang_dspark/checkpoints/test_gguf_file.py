"""Our GGUF reader and writer against the gguf library's, and against damaged files."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from sglang_dspark.checkpoints.gguf_file import (
    MAGIC,
    Kind,
    Long,
    encode,
    parse_gguf,
    quantised,
    stored_size,
    write_gguf,
)
from sglang_dspark.checkpoints.outputs import OutTensor
from sglang_dspark.checkpoints.places import FileSource
from sglang_dspark.errors import InputError


def out(name: str, values: torch.Tensor, kind: str) -> OutTensor:
    size = stored_size(kind, values.numel())
    return OutTensor(name, tuple(values.shape), kind, size, iter([quantised(values.reshape(-1), kind)]))


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    fields = [
        encode("general.architecture", Kind.STRING, "dflash"),
        encode("dflash.block_size", Kind.UINT32, 7),
        encode("dflash.eps", Kind.FLOAT32, 0.5),
        encode("dflash.anchor", Kind.BOOL, True),
        encode("dflash.target_layers", Kind.ARRAY, [2, 4]),
        encode("words", Kind.ARRAY, ["a", "ü"], Kind.STRING),
    ]
    kinds = ["F32", "F16", "BF16", "Q8_0"]
    stream = io.BytesIO()
    pieces = list(write_gguf(stream, fields, [out(k.lower(), values, k) for k in kinds]))
    assert sum(map(len, pieces)) == sum(stored_size(k, 192) for k in kinds)
    (tmp_path / "x.gguf").write_bytes(stream.getvalue())
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    contents = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert contents == {
        "general.architecture": "dflash", "dflash.block_size": 7, "dflash.eps": 0.5, "dflash.anchor": True,
        "dflash.target_layers": [2, 4], "words": ["a", "ü"],
    }  # fmt: skip
    ours = parse_gguf(FileSource(tmp_path / "x.gguf"))
    assert dict(ours.fields) == contents
    for tensor in reader.tensors:
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        read = ours.tensors[tensor.name]
        assert read.shape == (3, 64)
        assert torch.equal(read.read(0, 192).float().view(3, 64), torch.from_numpy(theirs.reshape(3, 64)))
    assert torch.equal(ours.tensors["f32"].rows(1, 3), values[1:3])
    assert float((ours.tensors["q8_0"].rows(0, 3) - values).abs().max()) < 0.02


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list([f"t{i}" for i in range(2000)])
    writer.add_array("small", [1, 2, 3])
    writer.add_tensor("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = parse_gguf(FileSource(tmp_path / "x.gguf"))
    assert found.fields["llama.block_count"] == 3 and found.fields["small"] == [1, 2, 3]
    assert found.fields["tokenizer.ggml.tokens"] == Long(2000)
    assert found.tensors["w"].rows(0, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    start, end = found.spans["llama.block_count"]
    assert (tmp_path / "x.gguf").read_bytes()[start:end] == encode("llama.block_count", Kind.UINT32, 3)


def header(tensors: int = 0, fields: bytes = b"", count: int = 0, version: int = 3) -> bytes:
    return MAGIC + struct.pack("<IQQ", version, tensors, count) + fields


def entry(name: bytes, axes: tuple[int, ...], kind: int, offset: int) -> bytes:
    text = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(axes))
    return text + struct.pack(f"<{len(axes)}Q", *axes) + struct.pack("<IQ", kind, offset)


DATA = bytes(64)
FIELD = encode("a", Kind.UINT32, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not begin as a GGUF file"),
        (b"GGML" + bytes(40), "does not begin as a GGUF file"),
        (header(version=1), "version is 1"),
        (header(version=0x03000000), "version is 50331648"),
        (header(tensors=1 << 40), "claims 1099511627776 tensors"),
        (header(count=1 << 63), "claims 0 tensors"),
        (header(count=1), "header ends at byte 24"),
        (header(fields=FIELD + FIELD, count=2), "the field 'a' twice"),
        (header(fields=struct.pack("<Q", 1 << 60), count=1) + DATA, "header ends at byte"),
        (header(fields=encode("a", Kind.UINT32, 1)[:9] + struct.pack("<I", 99), count=1), "unknown type 99"),
        (header(fields=struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 1), count=1), "not UTF-8"),
        (header(fields=encode("a", Kind.ARRAY, [])[:13] + struct.pack("<IQ", 4, 1 << 50), count=1), "array of"),
        (header(fields=encode("a", Kind.ARRAY, [])[:13] + struct.pack("<IQ", 9, 1) * 6, count=1), "nests arrays"),
        (header(fields=encode("general.alignment", Kind.UINT32, 0), count=1), "alignment is 0"),
        (header(1, entry(b"w", (1,) * 5, 0, 0)) + DATA, "has 5 axes"),
        (header(1, entry(b"w", (4,), 77, 0)) + DATA, "unknown type 77"),
        (header(1, entry(b"w", (1 << 62, 4), 0, 0)) + DATA, "has the shape"),
        (header(1, entry(b"w", (33,), 8, 0)) + DATA, "no multiple of 32"),
        (header(1, entry(b"w", (4,), 0, 1)) + DATA, "not aligned"),
        (header(1, entry(b"w", (4000,), 0, 0)) + DATA, "truncated"),
        (header(2, entry(b"w", (4,), 0, 0) + entry(b"w", (4,), 0, 32)) + bytes(128), "the tensor 'w' twice"),
        (header(2, entry(b"v", (16,), 0, 0) + entry(b"w", (4,), 0, 32)) + bytes(128), "overlaps"),
    ],
)  # fmt: skip
def test_unsound_files_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        parse_gguf(FileSource(tmp_path / "x.gguf"))
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_numbers_are_read_little_endian(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(header(fields=FIELD, count=1))
    assert parse_gguf(FileSource(tmp_path / "x.gguf")).fields == {"a": 1}
