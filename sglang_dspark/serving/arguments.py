"""Where SGLang resolves its arguments: a server that asks for DSPARK has its draft judged, the hooks of the parts that
it needs put in place, and its processes told.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dspark import __version__
from sglang_dspark.errors import InputError
from sglang_dspark.serving import channel, drafts, hooks, plugin
from sglang_dspark.serving.hooked import FRONT, Part

MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
OWN_MODELS = "sglang_dspark.serving.models"
Resolve = Callable[[Any], None]


def handle_speculation(original: Resolve, server_args: Any) -> None:
    """Around SGLang's resolution of everything speculative; servers without DSPARK pass through."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if (view.speculative_algorithm or "").upper() != "DSPARK":
        # Another server of this process may have been one with DSPARK.
        os.environ.pop(plugin.ACTIVE, None)
        original(server_args)
        return
    try:
        parts = _verified(view)
        admitted = _admitted(view, parts)
    except InputError as error:
        # A program that embeds SGLang gets the exception; a server's user a sentence.
        if not plugin.asks_for_dspark(sys.argv[1:]):
            raise
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if admitted is not None:
        declare_resolution(server_args, "sglang-dspark", speculative_draft_model_path=str(admitted.folder))
    os.environ[plugin.ACTIVE] = ",".join(parts)
    plugin.activate(parts)
    if "rounds" in parts:
        folder = tempfile.mkdtemp(prefix="dspark-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[channel.FOLDER] = folder
    # This is the process that will answer HTTP.
    hooks.apply([part for part in parts if part in FRONT])
    logging.getLogger(__name__).info(
        "DSPARK: sglang-dspark %s active (%s); draft: %s.",
        __version__,
        ", ".join(parts) or "nothing",
        admitted.summary if admitted else "not judged",
    )
    original(server_args)


def _verified(view: Any) -> list[Part]:
    """The parts that this server uses, verified. Raises InputError for what the CPU cannot serve."""
    cpu = view.device == "cpu"
    if cpu and not plugin.on_cpu():
        raise InputError(
            f"DSPARK on a CPU needs this package's platform; set {plugin.CHOSEN}={plugin.PLATFORM} before sglang is"
            " imported."
        )
    if cpu and (view.tp_size, view.pp_size, view.dp_size) != (1, 1, 1):
        raise InputError("DSPARK on a CPU runs in one process; leave out --tp-size, --pp-size and --dp-size.")
    used: list[Part] = ["checkpoints", "models", "requests", "rounds", "http"]
    return hooks.verified([*used, "cpu"] if cpu else used)


def _admitted(view: Any, parts: list[Part]) -> drafts.Admitted | None:
    """The draft, judged; None where it is part of the target's own checkpoint, or where that part is left out."""
    path, beside = view.speculative_draft_model_path, Path(view.model_path) / "dspark"
    if path is None and (beside / "config.json").is_file():
        path = str(beside)
    if path is None or "checkpoints" not in parts:
        return None
    block = view.speculative_dspark_block_size
    if block is None and view.speculative_num_draft_tokens is not None:
        block = view.speculative_num_draft_tokens - 1
    admitted = drafts.prepare(path, view.model_path, block, view.speculative_draft_model_revision, view.download_dir)
    if admitted.own_class is None:
        return admitted
    if "models" not in parts:
        raise InputError(
            f"{path} needs the part 'models', which does not fit this SGLang; install a supported version."
        )
    if os.environ.setdefault(MODELS, OWN_MODELS) != OWN_MODELS:
        raise InputError(
            f"{path} needs a model class of this package, but {MODELS} names another package; unset it for this draft."
        )
    return admitted


def admit_cpu(original: Resolve, server_args: Any) -> None:
    """Around SGLang's resolution of DSPARK's arguments, which refuses CPUs by the device's name and nothing else."""
    from sglang.srt.arg_groups import speculative_hook

    resolving_view = speculative_hook.resolving_view
    if resolving_view(server_args).device != "cpu":
        original(server_args)
        return
    speculative_hook.resolving_view = lambda args: _WithoutDevice(resolving_view(args))
    try:
        original(server_args)
    finally:
        speculative_hook.resolving_view = resolving_view
    # Overlapping needs streams, which a CPU has not.
    speculative_hook._disable_overlap_schedule_for_cpu(server_args)


def admit_gemma4(original: Resolve, server_args: Any) -> None:
    """Around SGLang's adjustments for models, which ask Gemma 4 targets for one of the attention backends that they
    name. This platform's masks windows as those do.
    """
    from sglang.srt.arg_groups import model_hook

    backends_of, model_config = model_hook.attention_backends_of, model_hook.model_config_of(server_args)
    if not any(name.startswith("Gemma4") for name in model_config.hf_config.architectures or ()):
        original(server_args)
        return
    model_hook.attention_backends_of = lambda view: tuple(
        "triton" if name == plugin.PLATFORM else name for name in backends_of(view)
    )
    try:
        original(server_args)
    finally:
        model_hook.attention_backends_of = backends_of


class _WithoutDevice:
    """Arguments whose device has a name that passes the gate. Nothing else in the function that sees it looks at it."""

    device = "cuda"

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)
