"""What a server with DSPARK makes of its arguments, in a process that never loads a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving_kit import golden_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("sglang")]

RESOLVE = """
import json, os, sys
sys.argv = ["launch_server", *sys.argv[1:]]
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang.srt.arg_groups.overrides import resolved_view
args = prepare_server_args(sys.argv[1:])
args.resolve_once()
view = resolved_view(args)
names = ("speculative_draft_model_path", "speculative_num_draft_tokens",
         "attention_backend", "disable_overlap_schedule")
print("RESOLVED " + json.dumps({name: getattr(view, name) for name in names} | {"active": os.environ["DSPARK_ACTIVE"]}))
"""


def resolve(target: Path, draft: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Resolve the arguments of a server; the result says what became of them."""
    home = str(target.parent / "home")
    return subprocess.run(
        [
            *(sys.executable, "-c", RESOLVE, "--model-path", str(target), "--device", "cpu"),
            *("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(draft), *more),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "DSPARK_HOME": home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return golden_pair("qwen3-vanilla", tmp_path_factory.mktemp("pair"))


def test_a_sound_server(pair: tuple[Path, Path]) -> None:
    done = resolve(*pair)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESOLVED "))
    data = json.loads(line.removeprefix("RESOLVED "))
    assert data["speculative_num_draft_tokens"] == 8
    assert data["attention_backend"] == "dspark_cpu"
    assert data["disable_overlap_schedule"] is True
    assert data["active"] == "checkpoints,models,cpu"
    shown = Path(data["speculative_draft_model_path"])
    assert shown.parent == pair[0].parent / "home" / "serving"
    assert (shown / "model.safetensors").resolve() == (pair[1] / "model.safetensors").resolve()


@pytest.mark.parametrize(
    "more, words",
    [
        (("--speculative-dspark-block-size", "9"), "trained for 7"),
        (("--speculative-num-draft-tokens", "10"), "trained for 7"),
        (("--tp-size", "2"), "leave out --tp-size"),
    ],
)
def test_refused_in_one_sentence_before_anything_loads(
    more: tuple[str, ...], words: str, pair: tuple[Path, Path]
) -> None:
    done = resolve(*pair, *more)
    assert done.returncode == 2, done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and words in errors[0]
    assert "Traceback" not in done.stderr


def test_another_platform_is_not_overruled(pair: tuple[Path, Path]) -> None:
    done = resolve(*pair, SGLANG_PLATFORM="")
    assert "RESOLVED" in done.stdout
    stranger = resolve(*pair, SGLANG_PLUGINS="somebody")
    assert "RESOLVED" not in stranger.stdout


def test_a_changed_sglang_ends_the_server(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A package that claims to be another version, in front of the real one."""
    info = tmp_path / "sglang-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.0.1\n")
    done = resolve(*pair, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "SGLang 0.0.1 is not one of the supported versions" in done.stderr
    warned = resolve(*pair, PYTHONPATH=str(tmp_path), DSPARK_UNSUPPORTED_SGLANG="warn")
    assert "RESOLVED" not in warned.stdout
    assert "goes on without the part 'cpu'" in warned.stderr + warned.stdout
