"""Builds a C++ source of this folder for this machine, once per source, compiler and processor, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root

SOURCE = Path(__file__).with_name("kernel.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-pthread", "-shared", "-fPIC")


def find_compiler() -> str | None:
    """The C++ compiler to use: $CXX, or the first of the usual names that is installed."""
    return os.environ.get("CXX") or next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)


def load_kernel(progress: Callable[[str], None] = lambda message: None, source: Path | None = None) -> ctypes.CDLL:
    """The library of `source` (kernel.cpp by default), built if it is not in the store yet.

    Raises InputError without a compiler, where it fails, or where the result cannot be stored.
    """
    source = source or SOURCE
    compiler = find_compiler()
    if compiler is None:
        raise InputError(
            "The compiled mode needs a C++ compiler; install one (Debian: apt install g++), or use --no-compile."
        )
    # What the compiler predefines tells its version and the instructions of this processor.
    about = _run([compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull], source.name)
    key = hashlib.sha256(source.read_bytes() + about + repr(FLAGS).encode()).hexdigest()[:16]
    library = store_root() / "native" / f"{source.stem}-{key}.so"
    if not library.is_file():
        progress(f"Compiling {source.name} with {compiler} (a few seconds, once)")
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=library.parent) as folder:
                part = Path(folder) / library.name
                _run([compiler, *FLAGS, str(source), "-o", str(part)], source.name)
                part.replace(library)
        except OSError as error:
            raise InputError(
                f"The compiled kernel cannot be stored in {library.parent} ({error.strerror}); set DSPARK_HOME to a"
                " writable folder, or use --no-compile."
            ) from error
    return _load(library)


@cache
def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise InputError(
            f"The compiled kernel {library} cannot be loaded ({error}); delete it, or use --no-compile."
        ) from error


def _run(command: list[str], what: str) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        reason = next((line for line in said.decode(errors="replace").splitlines() if "error" in line), str(error))
        raise InputError(
            f"{command[0]} cannot compile {what}: {reason}; name another compiler in CXX, or use --no-compile."
        ) from error
