"""A head of Qwen3-14B's size, as a sparse file: little memory, and not much slower than copying it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import QWEN3

from sglang_dspark.checkpoints.fields import Fields
from sglang_dspark.checkpoints.registry import read_draft
from sglang_dspark.checkpoints.spelling import expected_tensors, parse_config

QWEN3_14B: dict[str, Any] = {
    **QWEN3, "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "block_size": 7, "mask_token_id": 151669,
    "target_layer_ids": [1, 10, 19, 28, 37], "num_target_layers": 40, "markov_rank": 256,
}  # fmt: skip
MEGABYTES = 500
PROGRAM = """
import sys
from pathlib import Path
from sglang_dspark.checkpoints import convert
from sglang_dspark.checkpoints.outputs import Request
from sglang_dspark.checkpoints.registry import read_draft
source, to, out = sys.argv[1:]
draft = read_draft(Path(source))
seen = []
convert.write(draft, to, convert.plan(draft, to, Request()), Path(out), lambda done, total: seen.append(done))
assert len(seen) > 100
# Not getrusage: its peak counts what the parent held when it forked.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 1024)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_14B))
    header, offset = {}, 0
    for name, shape in expected_tensors(parse_config(Fields(QWEN3_14B, "a test"))).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder


def copied(source: Path, out: Path) -> float:
    """Seconds that a plain copy takes, holes written as zeros and flushed to the disk."""
    began = time.perf_counter()
    with source.open("rb") as read, out.open("wb") as write:
        shutil.copyfileobj(read, write, 1 << 22)
        write.flush()
        os.fsync(write.fileno())
    seconds = time.perf_counter() - began
    out.unlink()
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("to", ["speculators", "gguf"])
def test_little_memory_and_near_the_speed_of_a_copy(to: str, source: Path, tmp_path: Path) -> None:
    weights = source / "model.safetensors"
    size = weights.stat().st_size
    assert 6.8e9 < size < 6.9e9
    if shutil.disk_usage(tmp_path).free < 2.5 * size:
        pytest.skip("needs 17 GB of free disk")
    copy = copied(weights, tmp_path / "copy")
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source), to, str(tmp_path / "out")], capture_output=True, text=True
    )
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr[-2000:]
    megabytes = float(done.stdout)
    result = read_draft(tmp_path / "out")
    assert result.config() == read_draft(source).config() and len(result.tensors) == len(read_draft(source).tensors)
    shutil.rmtree(tmp_path / "out")
    print(f"{to}: {megabytes:.0f} MB resident, {seconds:.1f} s against {copy:.1f} s for a copy")
    assert megabytes < MEGABYTES
    # The reference is a copy on the same disk in the same minute; other load on the machine moves both.
    assert seconds < 2 * copy + 20
