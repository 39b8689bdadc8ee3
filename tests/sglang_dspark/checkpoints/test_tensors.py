"""Sound folders are listed and read; damaged, ambiguous and hostile ones are refused in one sentence."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang_dspark.checkpoints.places import Folder
from sglang_dspark.checkpoints.tensors import MAX_JSON, open_tensors, read_header, read_json
from sglang_dspark.errors import InputError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(header: Any, data: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        read()
    text = str(error.value)
    assert "\n" not in text and text.endswith(".")
    return text


def test_lists_and_loads(tmp_path: Path) -> None:
    saved = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = open_tensors(tmp_path)
    assert set(tensors) == set(saved)
    for name, tensor in saved.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(tensors.load(name), tensor)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends inside its header"),
        (b"abc", "ends inside its header"),
        (struct.pack("<Q", 1 << 62) + b"{}", "ends inside its header"),
        (raw({"a": F32, "b": {**F32, "data_offsets": [8, 16]}})[:-1], "is truncated: 'b' ends at byte 16 of 15"),
        (raw({"a": F32}), "8 bytes that belong to no tensor"),
        (raw({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}), "'b' in .* overlaps"),
        (raw({"a": {**F32, "data_offsets": [4, 12]}}), "overlaps its neighbour or leaves a gap"),
        (raw({"a": {**F32, "data_offsets": [0, 4]}}), "spans 4 bytes"),
        (raw({"a": {**F32, "data_offsets": [8, 0]}}), "spans -8 bytes"),
        (raw({"a": {**F32, "data_offsets": [-8, 0]}}), "overlaps its neighbour or leaves a gap"),
        (raw({"a": {**F32, "shape": [-2]}}), "malformed"),
        (raw({"a": {**F32, "shape": [True, 2]}}), "malformed"),
        (raw({"a": {**F32, "shape": 2}}), "malformed"),
        (raw({"a": {**F32, "data_offsets": [0]}}), "malformed"),
        (raw({"a": {"dtype": "F32"}}), "malformed"),
        (raw({"a": {**F32, "dtype": "F4"}}), "stored as F4"),
        (raw(b'{"a": {}, "a": {}}'), "the key 'a' twice"),
        (raw(b'{"a": {"dtype": "F32", "dtype": "F32"}}'), "the key 'dtype' twice"),
        (raw(b"[1]"), "a list instead of an object"),
        (raw(b"{"), "not valid JSON"),
        (raw(b"\xff\xfe{}"), "not valid JSON"),
        (raw(b'{"a":' * 100_000), "not valid JSON"),
    ],
)
def test_unsound_files_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=words):
        open_tensors(tmp_path)


def test_huge_headers_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", MAX_JSON + 1))
        stream.truncate(MAX_JSON + 100)  # sparse: takes no room
    assert "over the limit" in refusal(lambda: open_tensors(tmp_path))
    file.rename(tmp_path / "config.json")
    assert "more than" in refusal(lambda: read_json(tmp_path / "config.json"))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_files_never_escape_as_other_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any truncation or flipped byte either reads as a sound header or is an InputError."""
    file = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    content = bytearray(raw({"a": F32, "b": {**F32, "data_offsets": [8, 16]}}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(InputError):
        read_header(file)


def shards(folder: Path, weight_map: Any, files: dict[str, list[str]]) -> Path:
    for name, tensors in files.items():
        save_file({t: torch.ones(2) for t in tensors}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_lists_and_loads_shards(tmp_path: Path) -> None:
    files = {"s1.safetensors": ["a"], "s2.safetensors": ["b", "c"]}
    folder = shards(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"}, files)
    assert set(open_tensors(folder)) == {"a", "b", "c"}
    assert torch.equal(open_tensors(folder).load("b"), torch.ones(2))


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../outside.safetensors"}, "not a safetensors file of this folder"),
        ({"a": "/etc/passwd"}, "not a safetensors file of this folder"),
        ({"a": "sub/s1.safetensors"}, "not a safetensors file of this folder"),
        ({"a": "..\\s1.safetensors"}, "not a safetensors file of this folder"),
        ({"a": "pytorch_model.bin"}, "not a safetensors file of this folder"),
        ({"a": ""}, "not a safetensors file of this folder"),
        ({"a": "s3.safetensors"}, "names 's3.safetensors', which is missing"),
        ({"a": "s1.safetensors", "b": "s1.safetensors"}, "puts 'b' in s1.safetensors, but it is in no shard"),
        ({"a": "s1.safetensors", "c": "s2.safetensors"}, "'a' is both in s1.safetensors and in s2.safetensors"),
        ({"c": "s2.safetensors"}, "puts 'a' in no shard, but it is in s2.safetensors"),
        ([], "no 'weight_map'"),
        ({"a": 1}, "no 'weight_map'"),
    ],
)
def test_unsound_indexes_are_refused(weight_map: Any, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    shards(folder, weight_map, {"s1.safetensors": ["a"], "s2.safetensors": ["a", "c"]})
    assert words in refusal(lambda: open_tensors(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.pt", "model.pth", "last.ckpt"])
def test_pickles_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n")
    assert name in refusal(lambda: open_tensors(tmp_path))


def test_empty_and_absent_folders_are_refused(tmp_path: Path) -> None:
    assert "holds neither" in refusal(lambda: open_tensors(tmp_path))
    assert "no checkpoint folder" in refusal(lambda: open_tensors(tmp_path / "absent"))


def test_a_folder_that_may_not_be_listed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\); see to its permissions"):
        Folder(tmp_path).files()


def test_a_file_that_vanishes_is_reported(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert "Cannot read 'a'" in refusal(lambda: tensors.load("a"))
