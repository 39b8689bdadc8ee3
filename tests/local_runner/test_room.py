"""A pair without room is refused before it is read, in one sentence that says what would fit; never killed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from local_runner import room
from local_runner.footprint import Cache, DraftPrint, Footprint, Part
from local_runner.footprint.held import Forward, Held, in_llama, in_torch, with_held
from local_runner.placement.items import Wishes
from local_runner.room import Choice, make_room, used
from sglang_dspark.errors import InputError

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def fake_host(root: Path, *, total: int, available: int) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n")
    return root


def with_group(root: Path, limit: int) -> Path:
    """The host gets a control group of version 2 that this process is in."""
    (root / "proc/self").mkdir()
    (root / "proc/self/mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(limit))
    (group / "memory.current").write_text("0")
    return root


def pair(choice: Choice) -> tuple[Footprint, Wishes]:
    """4 layers of 25 MiB in float32, a draft of 20, and 64 KiB of cache a token in float32."""
    parts = tuple(Part(f"target layer {n}", "layer", 25 * MIB // 4, 25 * MIB, "F32", n) for n in range(4))
    draft = DraftPrint("d", (Part("draft backbone", "backbone", 5 * MIB, 20 * MIB, "F32"),), (), 3, 1, 0, True)
    caches = tuple(Cache(n, "full", 4096) for n in range(4))
    f = Footprint("tiny", parts, caches, 64, 16, 16, 4, 0, 0, 100 * MIB, draft if choice.drafting else None)
    precision: Any = choice.dtype
    wishes = Wishes(choice.context, dtype=precision, cache_dtype=precision or "float32", head_dtype=precision)
    return with_held(f, Held((("libraries", 10 * MIB),), 10 * MIB)), wishes


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """host(n): a host of 4 GiB, of which plans may give out n bytes."""

    def make(room_: int) -> None:
        kept = round(0.08 * (4 << 30))
        fake_host(tmp_path / "root", total=4 << 30, available=room_ + kept + 4096)
        monkeypatch.setattr(room, "ROOT", tmp_path / "root")

    return make


def test_what_fits_has_its_parts_and_thresholds_in_the_plan(host: Callable[[int], None]) -> None:
    host(700 * MIB)
    plan = make_room(pair, Choice(1000, "float32", True), "cpu")
    parts = plan["parts"]
    assert parts["target"] == 100 * MIB and parts["draft"] == 20 * MIB and parts["libraries"] == 10 * MIB
    assert parts["caches"] == 4 * 4096 * 4 * 1004 and plan["peak_bytes"] == sum(parts.values())
    assert parts["this process so far"] > 20 * MIB and plan["thresholds"]["available"] == round(0.08 * (4 << 30)) // 2
    measured = used({"device": "cpu", "plan": plan})
    assert measured["predicted_peak_bytes"] == plan["peak_bytes"] and measured["measured_peak_bytes"] > 20 * MIB


@pytest.mark.parametrize(
    ("room_", "change"),
    [
        (170, "use --context-length 512"),
        (100, "use --dtype bfloat16 and --context-length 768"),
        (74, "use --target without a draft and --context-length 256"),
        (50, "choose a smaller target, or free memory"),
    ],
)
def test_the_smallest_change_that_fits_is_named(room_: int, change: str, host: Callable[[int], None]) -> None:
    host(room_ * MIB)
    with pytest.raises(InputError) as refused:
        make_room(pair, Choice(1024, "float32", True), "cpu")
    said = str(refused.value)
    assert change in said and "tiny with its draft in float32 and 1024 tokens of context takes up to" in said
    assert f"{room_ * MIB / 1e6:.1f}"[:3] in said and said.count(". ") == 0 and said.endswith(".")


def test_the_change_that_is_named_does_fit(host: Callable[[int], None]) -> None:
    host(170 * MIB)
    assert make_room(pair, Choice(512, "float32", True), "cpu")
    with pytest.raises(InputError):
        make_room(pair, Choice(512 + 256, "float32", True), "cpu")


def shape(inner: int, dtype: str) -> Footprint:
    """One layer in Llama's form: hidden 64, 4 heads of 16, of which 2 keep keys and values."""
    elements = 64 * 64 * 2 + 64 * 64 + 3 * 64 * inner
    size = {"F32": 4, "BF16": 2}[dtype]
    parts = (
        Part("target embedding", "embedding", 64 * 1000, 64 * 1000 * size, dtype),
        Part("target layer 0", "layer", elements, elements * size, dtype, 0),
    )
    return Footprint("f", parts, (Cache(0, "full", 64),), 1000, 64, inner, 1, 0, 0, 10**9)


def copies(held: Held) -> dict[str, int]:
    return {name: size for name, size in held.decoding if name not in ("libraries", "tokenizer")}


def test_what_the_torch_engine_lays_out_anew() -> None:
    f = shape(128, "F32")
    layer, head = 64 * 64 * 3 + 3 * 64 * 128, 64 * 1000
    aside = layer - 64 * 64 - 64 * 128  # all but out and down
    assert copies(in_torch(f, Forward("float32", False, False, False))) == {}
    assert copies(in_torch(f, Forward("float32", True, False, False))) == {"matrices side by side": 4 * aside}
    packed = in_torch(f, Forward("bfloat16", True, True, False))
    assert copies(packed) == {"matrices laid out anew": 2 * layer, "lm_head laid out anew": 2 * head}
    compiled = in_torch(f, Forward("bfloat16", True, True, True))
    assert copies(compiled) == copies(packed) | {"matrices side by side": 2 * aside}


def test_a_checkpoint_of_another_precision_is_there_twice_while_it_is_read() -> None:
    plain = Forward("bfloat16", False, False, False)
    as_stored, converted = in_torch(shape(128, "BF16"), plain), in_torch(shape(128, "F32"), plain)
    assert converted.loading - as_stored.loading == shape(128, "F32").bytes
    first = in_torch(shape(128, "F32"), plain, unpacked_first=True)
    assert first.loading > converted.loading


def test_large_matrices_are_given_back_and_small_ones_kept() -> None:
    wide = shape(1 << 19, "F32")
    assert "matrices side by side" not in copies(in_torch(wide, Forward("bfloat16", True, True, True)))
    assert "matrices side by side" in copies(in_torch(shape(1 << 19, "BF16"), Forward("bfloat16", True, True, True)))


LIMITED = """
import sys
from pathlib import Path
from local_runner import room
from local_runner.engines.torch import engine, load

def loaded(*args, **options):
    raise SystemExit("weights were read")

room.ROOT = Path(sys.argv.pop(1))
if sys.argv.pop(1) == "watch":
    load.AutoModelForCausalLM.from_pretrained = loaded
from local_runner.cli import main
main()
"""


def child(root: Path, *arguments: object, watch: bool = False, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(root), "watch" if watch else "-", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, **more)


def tiny(golden: Path) -> Sequence[object]:
    folder = golden / "qwen3-vanilla"
    return ("--target", folder / "target", "--draft", folder / "draft", "--device", "cpu", "--threads", 1)


@pytest.fixture
def golden() -> Path:
    folder = Path(os.environ.get("DSPARK_GOLDEN", ROOT.parent / "shared" / "golden"))
    if not folder.is_dir():
        pytest.skip(f"there are no golden runs at {folder}; set DSPARK_GOLDEN to their folder")
    return folder


ASKED = ("generate", "--prompt-ids", "1,2,3", "--max-new-tokens", 8, "--json")


@pytest.mark.slow
def test_a_process_in_a_tight_control_group_refuses_before_it_reads(tmp_path: Path, golden: Path) -> None:
    root = with_group(fake_host(tmp_path, total=64 << 30, available=60 << 30), 300 * MIB)
    result = child(root, *ASKED, *tiny(golden), watch=True)
    assert result.returncode == 2 and result.stdout == "", result.stderr
    assert result.stderr.count("\n") == 1 and "may be given out" in result.stderr
    (root / "sys/fs/cgroup/memory.max").write_text(str(4 << 30))
    result = child(root, *ASKED, *tiny(golden))
    assert result.returncode == 0 and len(json.loads(result.stdout)["tokens"]) == 8, result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="limits of a process are read from /proc")
def test_a_process_under_a_real_limit_refuses_before_it_reads(golden: Path) -> None:
    """The kernel would refuse it memory at this limit; it finds out beforehand, and ends by itself."""

    def limited(size: int) -> subprocess.CompletedProcess[str]:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (size, size))

        return child(Path("/"), *ASKED, *tiny(golden), watch=size < 4 << 30, preexec_fn=limit)

    result = limited(600 * MIB)
    assert result.returncode == 2 and "may be given out" in result.stderr and "weights were read" not in result.stderr
    result = limited(8 << 30)
    assert result.returncode == 0 and len(json.loads(result.stdout)["tokens"]) == 8, result.stderr


PEAK = """
import importlib, json, sys
from local_runner import room
from local_runner.engines.base import Request
from local_runner.store import resolve_pair
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

kind, options, context = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
module = importlib.import_module(f"local_runner.engines.{kind}")
pair = resolve_pair("smollm2-135m", may_pull=True)
engine = module.load_engine(
    pair.target_path, pair.draft_path, device="cpu", threads=1, context_length=context, **options
)
prompt = tuple((1 + 7919 * i) % engine.target.vocab_size for i in range(context - 40))
for schedule in (None, Fixed()):
    list(engine.generate(Request(prompt, 32, SamplingParams(), schedule=schedule)))
print(json.dumps(room.used(engine.description)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", [512, 2048])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("torch", {"dtype": "float32"}),
        ("torch", {"dtype": "bfloat16", "compile": False}),
        ("torch", {"dtype": "bfloat16", "compile": True}),
        ("gguf", {}),
    ],
    ids=["float32", "bfloat16", "compiled", "gguf"],
)
def test_the_default_pair_takes_what_was_predicted(kind: str, options: dict[str, Any], context: int) -> None:
    """Within 5 % or 64 MiB, with the context full."""
    if kind == "gguf":
        pytest.importorskip("llama_cpp")
    result = subprocess.run(
        [sys.executable, "-c", PEAK, kind, json.dumps(options), str(context)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    memory = json.loads(result.stdout)
    predicted, measured = memory["predicted_peak_bytes"], memory["measured_peak_bytes"]
    assert abs(predicted - measured) <= max(64 * MIB, 0.05 * measured), memory


def test_llama_cpp_holds_no_copies() -> None:
    assert copies(in_llama(shape(128, "BF16"))) == {"vocabularies": 1000 * 320}
