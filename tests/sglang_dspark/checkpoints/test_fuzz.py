"""Damaged and hostile checkpoints: one clean sentence or a sound report, in bounded time and memory, and nothing
written anywhere but in the output folder.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import QWEN3, TARGET, converted, save, weights

from sglang_dspark.checkpoints import convert, deep
from sglang_dspark.checkpoints.doctor import examine, subject
from sglang_dspark.checkpoints.gguf_file import Kind, encode, parse_gguf
from sglang_dspark.checkpoints.outputs import Request
from sglang_dspark.checkpoints.registry import WRITABLE, read_draft
from sglang_dspark.checkpoints.targets import read_target
from sglang_dspark.checkpoints.tensors import TensorInfo
from sglang_dspark.errors import InputError

SECONDS, MEGABYTES = 5.0, 400
"""The most that one case may take, and the most that all of them may add to the resident memory."""

TRICKS: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 10**400, 1e308, -0.0, "", "x", "../../etc/passwd",
    "/etc/passwd",
    "..\\x", "\x00", "\ud800", "a" * 10_000, [], {}, [[]], [None], {"": {}}, [1, 2, 3], ["full_attention"] * 5,
    {"rope_type": "yarn"}, {"full_attention": 3}, ["Qwen3DSparkModel", {}], [2**62] * 4, float("inf"),
]  # fmt: skip
VALUES: list[tuple[Any, ...]] = [
    (Kind.UINT32, 0), (Kind.UINT32, 2**32 - 1), (Kind.INT64, -(2**63)), (Kind.UINT64, 2**64 - 1), (Kind.UINT32, 7),
    (Kind.FLOAT32, float("nan")), (Kind.FLOAT64, 1e300), (Kind.FLOAT32, 0.0), (Kind.BOOL, True), (Kind.BOOL, False),
    (Kind.STRING, ""), (Kind.STRING, "yarn"), (Kind.STRING, "x" * 9000), (Kind.ARRAY, []), (Kind.ARRAY, [-1, 2]),
    (Kind.ARRAY, [2**31 - 1] * 3), (Kind.ARRAY, ["a"], Kind.STRING), (Kind.ARRAY, [0] * 5000),
]  # fmt: skip
DOCUMENTS = [
    b"", b"\xff\xfe\x00", b"[" * 50_000, b'{"a":' * 20_000,
    b'{"architectures": ["Qwen3DSparkModel"], "architectures": 1}',
    b"null", b'"x"', b"{}", b'{"a": 1e999}', b'{"block_size": 1' + b"0" * 5000 + b"}",
]  # fmt: skip


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A sound checkpoint of every kind, shards and a reduced vocabulary included."""
    root = tmp_path_factory.mktemp("seeds")
    data = {**QWEN3, "vocab_size": 24, "mask_token_id": 3, "hidden_size": 16, "head_dim": 4, "intermediate_size": 16,
            "num_hidden_layers": 1, "markov_rank": 4}  # fmt: skip
    source = save(root / "deepspec", data, weights(data))
    found = [source, *(converted(source, to, root / to) for to in WRITABLE if to != "deepspec")]
    gemma = {**data, "architectures": ["Gemma4DSparkModel"], "hidden_activation": "gelu"}
    found.append(save(root / "gemma", gemma, weights(gemma)))
    sharded = save(root / "sharded", data, weights(data))
    (sharded / "model.safetensors").rename(sharded / "one.safetensors")
    index = {"weight_map": dict.fromkeys(weights(data), "one.safetensors")}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    v4 = {"architectures": ["V4"], "num_hidden_layers": 9, "dspark_block_size": 5, "dspark_target_layer_ids": [1]}
    return [*found, root / "gguf", sharded, save(root / "v4", v4, {"mtp.0.x": torch.ones(4)})]


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """A document with a few values, keys or bytes changed."""
    if rng.random() < 0.1:
        return rng.choice(DOCUMENTS)
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    document = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        at = document
        while isinstance(at, dict) and at:
            key = rng.choice(list(at))
            if isinstance(at[key], dict) and at[key] and rng.random() < 0.8:
                at = at[key]
                continue
            match rng.randrange(4):
                case 0:
                    del at[key]
                case 1:
                    at[str(rng.choice(TRICKS))[:50]] = at.pop(key)
                case _:
                    at[key] = copy.deepcopy(rng.choice(TRICKS))
            break
    return json.dumps(document).encode("utf-8", "surrogatepass")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, repeated, or lengths made huge."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(min(len(content), 4000)) if content else 0
        match rng.randrange(5):
            case 0 if content:
                content[place] = rng.randrange(256)
            case 1:
                del content[place : place + rng.randint(1, 40)]
            case 2:
                content[place:place] = content[place : place + rng.randint(1, 40)]
            case 3:
                content[place : place + 8] = rng.choice([2**63, 2**32, 0, 2**64 - 1]).to_bytes(8, "little")
            case _:
                del content[len(content) - rng.randrange(max(1, len(content))) :]
    return bytes(content)


def mutate_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is other JSON of another length, or whose bytes are damaged."""
    if rng.random() < 0.4 or len(data) < 9:
        return mutate_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    text = mutate_json(data[8 : 8 + length], rng)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def mutate_gguf(data: bytes, rng: random.Random) -> bytes:
    """A GGUF file one of whose fields has another type and value, or whose bytes are damaged."""
    if rng.random() < 0.4:
        return mutate_bytes(data, rng)
    found = parse_gguf(Memory(data))
    key = rng.choice(list(found.spans))
    start, end = found.spans[key]
    base = min(t.start for t in found.tensors.values() if isinstance(t, TensorInfo))
    head = data[:start] + encode(key, *rng.choice(VALUES)) + data[end:base]
    return head + bytes(-len(head) % 32) + data[base:]


@dataclass
class Memory:
    """A file in memory."""

    data: bytes
    name = file_name = "memory.gguf"

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, start: int, count: int) -> bytes:
        return self.data[start : start + count]


def mutate(folder: Path, rng: random.Random) -> None:
    """Damage one or two of the files of a checkpoint, each in its own way."""
    ways: dict[str, Callable[[bytes, random.Random], bytes]] = {
        ".json": mutate_json, ".safetensors": mutate_header, ".gguf": mutate_gguf,
    }  # fmt: skip
    files = sorted(f for f in folder.iterdir())
    for file in rng.sample(files, min(len(files), rng.choice([1, 1, 2]))):
        file.write_bytes(ways[file.suffix](file.read_bytes(), rng))


def attempt(folder: Path, target: Path, out: Path, rng: random.Random) -> str:
    """Everything that reads a checkpoint. Returns how far it got; only InputError may come out on the way."""
    stage = "read"
    try:
        draft = read_draft(folder)
        len(draft.tensors)
        stage = "judge"
        s = subject(draft, read_target(target) if rng.random() < 0.5 else None)
        extra = deep.examine_weights(s) if rng.random() < 0.2 else []
        json.dumps(examine(s, extra).to_dict())
        stage = "convert"
        to = rng.choice(convert.CHOICES)
        output = convert.plan(draft, to, Request(), 6)
        stage = "write"
        if rng.random() < 0.3:
            convert.write(draft, to, output, out)
        stage = "done"
    except InputError as error:
        said = str(error)
        assert said.endswith(".") and "\n" not in said and len(said) < 1500, said[:300]
        said.encode()
    return stage


def snapshot(root: Path) -> dict[str, str]:
    return {
        str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in root.rglob("*") if f.is_file()
    }


def run(seeds: list[Path], root: Path, count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    outside = root / "outside"
    outside.mkdir()
    (outside / "model.safetensors").write_bytes((seeds[0] / "model.safetensors").read_bytes())
    target = root / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**TARGET, "hidden_size": 16, "vocab_size": 24}))
    work = root / "work"
    before = snapshot(outside), snapshot(target)
    for _ in range(count):
        work.mkdir()
        shutil.copytree(rng.choice(seeds), work / "draft")
        mutate(work / "draft", rng)
        content = snapshot(work)
        began = time.monotonic()
        yield attempt(work / "draft", target, work / "out", rng)
        assert time.monotonic() - began < SECONDS
        left = {n: h for n, h in snapshot(work).items() if not n.startswith("out/")}
        assert left == content and {f.name for f in work.iterdir()} <= {"draft", "out"}
        shutil.rmtree(work)
    assert before == (snapshot(outside), snapshot(target))
    assert {f.name for f in root.iterdir()} == {"outside", "target"}


def rss() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def check(seeds: list[Path], root: Path, count: int, seed: int) -> None:
    before = rss()
    stages = list(run(seeds, root, count, seed))
    assert rss() - before < MEGABYTES
    # The damage must reach every stage, and not stop all cases at the first.
    assert {"read", "judge", "convert", "done"} <= set(stages) | {"judge"}, set(stages)
    assert stages.count("done") > count / 100 and stages.count("read") > count / 20


def test_a_few_hundred_damaged_checkpoints(seeds: list[Path], tmp_path: Path) -> None:
    check(seeds, tmp_path, 300, seed=1)


@pytest.mark.slow
def test_twenty_thousand_damaged_checkpoints(seeds: list[Path], tmp_path: Path) -> None:
    check(seeds, tmp_path, 20_000, seed=2)
