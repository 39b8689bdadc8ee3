"""GGUF targets: transformers unpacks them, which takes a while, so what it unpacked is kept beside the fetched
files.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dspark.checkpoints.tensors import open_tensors
from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root

LARGEST_KEPT = 1 << 30
"""Larger files (bytes) are unpacked anew each time: in float32 they would take up to eight times this on the disk."""


def unpack_options(path: Path) -> dict[str, Any]:
    """Options with which transformers reads the GGUF file `path` and unpacks all weights."""
    options: dict[str, Any] = {"gguf_file": path.name}
    # Releases before this class always unpack; later ones would multiply with packed weights, many times slower.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return options


def kept_copy(path: Path) -> Path | None:
    """The folder that `unpacked` made of this very file earlier, or None. One that is damaged since is removed."""
    if path.stat().st_size > LARGEST_KEPT:
        return None
    folder = _place(path)
    if not folder.is_dir():
        return None
    try:
        open_tensors(folder)
    except InputError:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder


def unpacked(path: Path) -> Path | None:
    """A folder in transformers format, float32, with the weights and tokenizer of a GGUF file; made at first use.

    None where the file is too large to keep twice or there is nowhere to keep it. A file that changed is unpacked anew.
    """
    kept = kept_copy(path)
    if kept is not None or path.stat().st_size > LARGEST_KEPT:
        return kept
    folder = _place(path)
    root = folder.parent
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, local_files_only=True, **unpack_options(path)
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    part: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=root))
        _write(model, part)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    except OSError:
        # No room, no permission, or another process was first: the file itself can still be read.
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        return folder if folder.is_dir() else None
    return folder


def _place(path: Path) -> Path:
    about = path.stat()
    return store_root() / "unpacked" / f"{path.stem}-{_digest(path.absolute(), about.st_size, about.st_mtime_ns)}"


@cache
def _digest(path: Path, size: int, modified_ns: int) -> str:
    """What names a copy: the file's bytes, because sizes and times of different files may be equal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _write(model: Any, folder: Path) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.to_json_file(folder / "config.json")
    model.generation_config.to_json_file(folder / "generation_config.json")
    kept = {name: t.contiguous() for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        kept.pop("lm_head.weight", None)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
