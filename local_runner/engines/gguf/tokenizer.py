"""A GGUF file's tokenizer, as transformers reads it. That takes seconds, so what it read is kept in the store."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from local_runner.engines.gguf.files import TargetFile
from local_runner.engines.torch.gguf import kept_copy
from local_runner.engines.torch.load import LOCAL
from sglang_dspark.checkpoints.places import FileSource
from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root


def read_tokenizer(file: TargetFile) -> Any:
    """The tokenizer that the PyTorch engine has on the same file, or None where the file holds none.

    Raises InputError for one that transformers cannot read.
    """
    assert file.target.header is not None
    if "tokenizer.ggml.tokens" not in file.target.header.fields:
        return None
    kept = kept_copy(file.path) or _place(file)
    found = (kept / "tokenizer.json").is_file()
    where: dict[str, Any] = {} if found else {"gguf_file": file.path.name}
    try:
        read = AutoTokenizer.from_pretrained(kept if found else file.path.parent, **LOCAL, **where)
    except Exception as error:  # a foreign file meets foreign code here, which raises whatever it likes
        raise InputError(f"transformers cannot read the tokenizer of {file.path}: {error}") from error
    if found:
        return read
    # Without room or permission, or where another process was first, it has been read all the same.
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".reading-", dir=kept.parent))
        read.save_pretrained(part)
        part.rename(kept)
    return read


def _place(file: TargetFile) -> Path:
    """Where the tokenizer of this very file is kept."""
    assert file.target.header is not None
    source, digest = FileSource(file.path), hashlib.sha256()
    for key, (start, end) in file.target.header.spans.items():
        if key.startswith("tokenizer."):
            digest.update(source.read(start, end - start))
    return store_root() / "tokenizers" / f"{file.path.stem}-{digest.hexdigest()[:16]}"
