"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from sglang_dspark.errors import InputError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open `path` for writing text; it appears under its name when the block ends, and not at all if that raises.

    Something that is not a regular file (a terminal, a pipe, the null device) is written to directly, never replaced.
    Raises InputError if the file cannot be opened.
    """
    try:
        direct = path.exists() and not path.is_file()
        final = path.resolve()
        part = path if direct else final.with_name(f".{final.name}.{os.getpid()}.part")
        stream = part.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}); choose a file in an existing, writable folder."
        ) from error
    try:
        with stream:
            yield stream
            stream.flush()
            if not direct:
                os.fsync(stream.fileno())
        if not direct:
            part.replace(final)
    finally:
        if not direct:
            part.unlink(missing_ok=True)
