"""When the plug-in does something, and to whom."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import pytest

from sglang_dspark.serving import hooks, plugin
from sglang_dspark.serving.torchvision_shim import REGISTRATIONS, BeforeTorchvision, built_apart

DSPARK = ["--model-path", "m", "--speculative-algorithm", "DSPARK"]


@pytest.mark.parametrize(
    "arguments, asks",
    [
        (DSPARK, True),
        (["--speculative-algorithm=dspark"], True),
        (["--speculative-algorithm", "EAGLE"], False),
        (["--model-path", "DSPARK"], False),
        (["--speculative-algorithm", "DSPARK", "--speculative-algorithm", "EAGLE"], False),
        (["--speculative-algorithm"], False),
        ([], False),
    ],
)
def test_command_lines_that_ask_for_dspark(arguments: list[str], asks: bool) -> None:
    assert plugin.asks_for_dspark(arguments) is asks


@pytest.mark.parametrize(
    "arguments, chosen, accelerator, cpu",
    [
        ([*DSPARK, "--device", "cpu"], None, True, True),
        (DSPARK, None, False, True),
        (DSPARK, None, True, False),
        ([*DSPARK, "--device=cuda"], None, False, False),
        (["--device", "cpu"], None, False, False),
        ([], "dspark_cpu", True, True),
        (DSPARK, "another", False, False),
    ],
)
def test_the_platform_is_for_dspark_on_a_cpu_or_for_who_chooses_it(
    arguments: list[str], chosen: str | None, accelerator: bool, cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", *arguments])
    monkeypatch.setattr(plugin, "_accelerator", lambda: accelerator)
    monkeypatch.setattr(hooks, "verified", lambda parts: parts)
    monkeypatch.delenv(plugin.ACTIVE, raising=False)
    monkeypatch.delenv(plugin.CHOSEN, raising=False)
    if chosen:
        monkeypatch.setenv(plugin.CHOSEN, chosen)
    assert (plugin.platform() is not None) is cpu


def test_no_platform_without_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "on_cpu", lambda: True)
    monkeypatch.setattr(hooks, "verified", lambda parts: [])
    monkeypatch.delenv(plugin.ACTIVE, raising=False)
    assert plugin.platform() is None


def test_children_learn_what_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.ACTIVE, "cpu,nonsense,checkpoints")
    assert plugin.active_parts() == ["checkpoints", "cpu"]


def test_one_hook_comes_first() -> None:
    assert hooks.HOOKS[0].by == "arguments:handle_speculation"
    assert {h.part for h in hooks.HOOKS} == set(get_args(hooks.Part))
    assert len({(h.target, h.kind) for h in hooks.HOOKS}) == len(hooks.HOOKS)


def test_hooks_name_functions_that_exist() -> None:
    for hook in hooks.HOOKS:
        if hook.by is not None:
            assert callable(hooks.implementation(hook))


def test_the_shim_empties_two_modules_of_a_torchvision_built_for_another_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert built_apart("2.13.0+cpu", "0.28.0")
    assert not built_apart("2.13.0+cpu", "0.28.0+cpu")
    assert not built_apart("2.13.0", "0.28.0")
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    finder = BeforeTorchvision()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.setattr(sys, "modules", {n: m for n, m in sys.modules.items() if not n.startswith("torchvision")})
    assert finder.find_spec("json") is None
    assert not set(REGISTRATIONS) & set(sys.modules)
    assert finder.find_spec("torchvision") is None
    assert set(REGISTRATIONS) <= set(sys.modules)
    assert finder not in sys.meta_path


PLAIN = """
import sys
sys.argv = ["launch_server", "--model-path", "m"]
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.platforms import current_platform
assert list(HookRegistry._hooks) == ["sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"]
assert not current_platform.is_out_of_tree()
from sglang.srt.arg_groups import choices
assert "dspark_cpu" not in choices.ATTENTION_BACKEND_CHOICES
assert "sglang_dspark.serving.cpu" not in sys.modules
import os
assert "DSPARK_ACTIVE" not in os.environ and "SGLANG_EXTERNAL_MODEL_PACKAGE" not in os.environ
print("untouched")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("sglang")
def test_nothing_happens_to_servers_without_dspark() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, env=os.environ, timeout=600)
    assert "untouched" in done.stdout, done.stderr[-2000:]
