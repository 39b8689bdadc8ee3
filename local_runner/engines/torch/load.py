"""Reads a target from a safetensors folder or a GGUF file into a transformers model, and what belongs to it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from local_runner.engines.torch.gguf import kept_copy, unpack_options, unpacked
from local_runner.engines.torch.lean import is_lean
from local_runner.engines.torch.target import LeanTarget, NativeTarget, TorchTarget, TransformersTarget
from sglang_dspark.checkpoints.tensors import open_tensors
from sglang_dspark.draft.linear import cpu_multiplies_bfloat16
from sglang_dspark.errors import InputError
from sglang_dspark.native.build import find_compiler, load_kernel

LOCAL = {"local_files_only": True, "trust_remote_code": False}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_CONTEXT = 8192
"""Context of a target that allows more, unless asked for: caches are allocated whole."""


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` takes CUDA, then MPS, then the CPU. Raises InputError for one that is not
    here.
    """
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if here[kind]))
    if name.split(":")[0] not in here:
        raise InputError(f"'{name}' is no device; use auto, cpu, cuda or mps.")
    if not here[name.split(":")[0]]:
        raise InputError(f"PyTorch finds no {name} device on this machine; use --device cpu.")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of that name; `auto` is bfloat16 wherever the device multiplies in it, else float32."""
    if name == "auto":
        quick = device.type != "cpu" or cpu_multiplies_bfloat16()
        return torch.bfloat16 if quick else torch.float32
    if name not in DTYPES:
        raise InputError(f"'{name}' is no precision; use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def load_target(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int | None,
    compile: bool | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> TorchTarget:
    """Read the target at `path`. Raises InputError that says what is wrong with the folder or file.

    `compile` says whether to run it on the compiled kernel; None does where the kernel computes such a target and there
    is a compiler to build it.
    """
    model, capacity = load_model(path, dtype=dtype, device=device, context_length=context_length, progress=progress)
    fits = NativeTarget.fits(model)
    if compile and not fits:
        raise InputError(
            f"The compiled mode runs Llama- and Qwen3-shaped targets in bfloat16 on a CPU, which {path.name} as"
            f" {str(dtype).removeprefix('torch.')} on {device.type} is not; leave --compile out."
        )
    if compile or (compile is None and fits and _kernel_is_ready(progress)):
        return NativeTarget(model, capacity, progress)
    return LeanTarget(model, capacity) if is_lean(model.config) else TransformersTarget(model, capacity)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> tuple[Any, int]:
    """Read the transformers model at `path`, frozen, and the context to make room for. Raises InputError as above."""
    if path.suffix == ".gguf" and path.is_file() and kept_copy(path) is None:
        progress(f"Unpacking {path.name} (once)")
    where, options = _source(path)
    if not options:
        open_tensors(where)  # refuses pickles, truncated files and bad headers before anything is allocated
    config = _read(
        AutoConfig.from_pretrained, path, where, **LOCAL, **{k: v for k, v in options.items() if k == "gguf_file"}
    )
    text = config.get_text_config()
    most = int(getattr(text, "max_position_embeddings", 0) or DEFAULT_CONTEXT)
    if context_length is not None and not 1 <= context_length <= most:
        raise InputError(
            f"A context of {context_length} tokens does not fit the target at {path}, which allows {most}."
        )
    model, info = _read(
        AutoModelForCausalLM.from_pretrained,
        path,
        where,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        **LOCAL,
        **options,
    )
    for key, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        if info[key]:
            names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in info[key])
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(f"The target at {path} {what} the tensor {names[0]}{more}; fetch it again.")
    model = model.eval().requires_grad_(False).to(device)
    return model, context_length or min(most, DEFAULT_CONTEXT)


def _kernel_is_ready(progress: Callable[[str], None]) -> bool:
    """Whether the compiled kernel is there, built now if need be. Where it cannot be built, PyTorch alone will do."""
    if find_compiler() is None:
        return False
    try:
        load_kernel(progress)
    except InputError as error:
        progress(f"Note: {error}")
        return False
    return True


def load_tokenizer(path: Path) -> Any:
    """The target's tokenizer, or None where the folder holds none."""
    where, options = _source(path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not options and not any((where / name).is_file() for name in names):
        return None
    options.pop("quantization_config", None)
    return _read(AutoTokenizer.from_pretrained, path, where, **LOCAL, **options)


def stop_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: those of the generation config, or else the tokenizer's end of sequence."""
    file = path / "generation_config.json"
    ids: Any = None
    if file.is_file():
        try:
            ids = json.loads(file.read_text()).get("eos_token_id")
        except (ValueError, AttributeError):
            raise InputError(f"{file} is not a JSON object; fetch it again.") from None
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _source(path: Path) -> tuple[Path, dict[str, Any]]:
    """Where transformers finds the target, and the options that say how. Raises InputError if there is nothing to
    read.
    """
    if path.is_file() and path.suffix == ".gguf":
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{path} does not begin as a GGUF file does; fetch it again.")
        kept = _read(unpacked, path, path)
        return (path.parent, unpack_options(path)) if kept is None else (kept, {})
    if not path.is_dir():
        raise InputError(f"There is no target at {path}; give a folder, a .gguf file, a pair's name or a hub id.")
    if not (path / "config.json").is_file():
        raise InputError(f"The target folder {path} has no config.json; give a folder in transformers format.")
    return path, {}


def _read(reader: Any, path: Path, where: Path, **options: Any) -> Any:
    """Call a transformers loader on local files only, with neither chatter nor a checkpoint's own code."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        # Unpacking a GGUF file draws a bar that no setting of transformers hides.
        with contextlib.redirect_stderr(io.StringIO()):
            return reader(where, **options)
    except Exception as error:  # a foreign file meets foreign code here, which raises whatever it likes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"transformers cannot read {path}: {reason}") from error
