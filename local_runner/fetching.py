"""What every way of fetching shares: one fetcher at a time, room on the disk, hashes, files that appear whole or never.

Files are written under a temporary name, flushed to the disk and renamed, so whatever bears its final name is complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout
from rich.filesize import decimal

from local_runner.progress import Report
from sglang_dspark.errors import InputError

_CHUNK = 1 << 20
_POLL_S = 0.1
_GRACE_S = 5.0


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make `folder`, and turn what the disk refuses while writing there into one sentence (InputError)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"The disk of {folder} is full; free some space or set DSPARK_HOME to another disk."
            ) from error
        reason = error.strerror or str(error)
        raise InputError(
            f"The cache folder {folder} cannot be written ({reason}); set DSPARK_HOME to one that can."
        ) from error


@contextmanager
def only_one(lock_file: Path, report: Report, what: str) -> Iterator[None]:
    """Hold `lock_file`, waiting for another process that does; the system frees it when its holder dies."""
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"Waiting for another process that is fetching {what}", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise InputError unless `needed` bytes are free on the disk of `folder`, which need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise InputError(
            f"Fetching {what} needs {decimal(needed)} in {folder}, but only {decimal(free)} are free;"
            " free some space or move the cache to another disk."
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as lower-case hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_hashed(source: IO[bytes], target: Path, advance: Callable[[int], None]) -> tuple[int, str]:
    """Write `source` to `target`, down to the disk; return its size in bytes and its SHA-256."""
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as out:
        while chunk := source.read(_CHUNK):
            out.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            advance(size)
        out.flush()
        os.fsync(out.fileno())
    return size, digest.hexdigest()


def publish(temporary: Path, final: Path) -> None:
    """Give a finished file its final name in one step that survives a power cut."""
    os.replace(temporary, final)
    if os.name == "posix":
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def run_child(command: Sequence[str], env: Mapping[str, str], log: Path, poll: Callable[[], None]) -> int:
    """Run a downloader, its output in `log`, calling `poll` while it works; return its exit code.

    A child process rather than a thread, because it can be ended: however this function is left, the child is gone.
    """
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )
    try:
        while True:
            try:
                return child.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                poll()
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def size_below(folder: Path) -> int:
    """Bytes of the files under `folder`, some of which may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
