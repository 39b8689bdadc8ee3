"""Writing a safetensors folder: config.json and one model.safetensors, streamed, with the same bytes each time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from sglang_dspark.checkpoints.drafts import D2T, Draft
from sglang_dspark.checkpoints.outputs import CONFIG, Output, OutTensor, as_stored
from sglang_dspark.checkpoints.tensors import DTYPES, Readable


def output(draft: Draft, config: Mapping[str, Any], extra: Mapping[str, Readable] | None = None) -> Output:
    """The draft's tensors under DeepSpec's names, and `extra` ones, beside `config`."""
    chosen = {name: t for name, t in draft.tensors.items() if name != D2T} | dict(extra or {})
    return Output({CONFIG: document(config)}, ordered([as_stored(name, t) for name, t in chosen.items()]))


def document(data: Mapping[str, Any]) -> bytes:
    """A JSON document with the same bytes for the same content."""
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def ordered(tensors: Sequence[OutTensor]) -> list[OutTensor]:
    """Wide types first, so that every tensor is aligned, then by name."""
    return sorted(tensors, key=lambda t: (-DTYPES[t.kind].itemsize, t.name))


def write_safetensors(stream: BinaryIO, metadata: Mapping[str, str], tensors: Sequence[OutTensor]) -> Iterator[bytes]:
    """Write a whole file, yielding each piece of data once it is written."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.kind,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        for data in tensor.data:
            stream.write(data)
            yield data
