"""The entry points that SGLang calls in each of its processes. They import nothing of SGLang unless DSPARK is used.

The command line of `launch_server` is read before SGLang does, for two options only. A process that resolves arguments
which ask for DSPARK passes on in `ACTIVE`, to the processes that it starts, which parts of this package are in use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sglang_dspark.serving import hooks
from sglang_dspark.serving.hooked import FRONT, HOOKS, PARTS, Part

ACTIVE = "DSPARK_ACTIVE"
PLATFORM = "dspark_cpu"
"""The name of the platform's entry point and of its attention backend."""
CHOSEN = "SGLANG_PLATFORM"
PLATFORM_CLASS = "sglang_dspark.serving.platform.TorchCpuPlatform"


def register() -> None:
    """Entry point of sglang.srt.plugins, called in every process before arguments are parsed.

    Raises Unsupported, which ends the process, if DSPARK is asked for and this SGLang is not one that it fits.
    """
    inherited = active_parts()
    if inherited:
        activate(hooks.verified(inherited))
        return
    if asks_for_dspark(sys.argv[1:]):
        hooks.verified(PARTS)
    if on_cpu():
        activate(hooks.verified(["cpu"]))
    watch()


def watch() -> None:
    """Hook the one function in which SGLang looks at its speculative arguments; the rest follows if they say DSPARK."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hook = HOOKS[0]
    HookRegistry.register(hook.target, hooks.implementation(hook), HookType(hook.kind))


def platform() -> str | None:
    """Entry point of sglang.srt.platforms: the CPU platform, for servers with DSPARK on a CPU and for those that choose
    it by SGLANG_PLATFORM=dspark_cpu; otherwise None, which leaves the choice to SGLang.
    """
    return PLATFORM_CLASS if "cpu" in active_parts() or (on_cpu() and hooks.verified(["cpu"])) else None


def on_cpu() -> bool:
    """Whether this process is one that the CPU platform is for, as far as the command line and environment tell."""
    if os.environ.get(CHOSEN):
        return os.environ[CHOSEN] == PLATFORM
    arguments = sys.argv[1:]
    if not asks_for_dspark(arguments):
        return False
    device = option(arguments, "--device")
    return device == "cpu" or (device is None and not _accelerator())


def active_parts() -> list[Part]:
    """The parts that the process which started this one is using."""
    given = os.environ.get(ACTIVE, "").split(",")
    return [part for part in PARTS if part in given]


def activate(parts: Sequence[Part]) -> None:
    """Put verified `parts` to work in this process. Processes that run models need their hooks, the one that resolves
    arguments and those that have loaded SGLang's HTTP server need the others.
    """
    if "cpu" in parts:
        from sglang_dspark.serving.cpu import announce

        announce()
    if "sglang.srt.managers.scheduler" in sys.modules or not active_parts():
        hooks.apply([part for part in parts if part != "checkpoints" and part not in FRONT])
    if "sglang.srt.entrypoints.http_server" in sys.modules:
        hooks.apply([part for part in parts if part in FRONT])


def asks_for_dspark(arguments: Sequence[str]) -> bool:
    """Whether a command line chooses DSPARK."""
    return (option(arguments, "--speculative-algorithm") or "").upper() == "DSPARK"


def option(arguments: Sequence[str], name: str) -> str | None:
    """The last value of an option on a command line, as `--name value` or `--name=value`."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
    return value


def _accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
