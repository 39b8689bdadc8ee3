"""Where a checkpoint lies, and bytes that are read in parts: a local folder or .gguf file here, a hub in `hub`.

Everything that reads a checkpoint goes through these two protocols, so that a repository on a hub is judged from the
same few kilobytes of headers as a folder on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sglang_dspark.errors import InputError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Source(Protocol):
    """One file, wherever it is."""

    @property
    def name(self) -> str:
        """What messages call it: a path or an address."""

    @property
    def file_name(self) -> str:
        """Its bare name."""

    @property
    def size(self) -> int:
        """Bytes."""

    def read(self, start: int, count: int) -> bytes:
        """Exactly the `count` bytes from `start` on. Raises InputError if they cannot be had."""


class Place(Protocol):
    """The files of one checkpoint."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def files(self) -> Sequence[str]:
        """The bare names of its files, without those of folders inside it."""

    def source(self, name: str) -> Source:
        """The file of that bare name. Raises InputError if it is not there."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """A local file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    @property
    def file_name(self) -> str:
        """Its bare name."""
        return self.path.name

    @property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size

    def read(self, start: int, count: int) -> bytes:
        """See `Source.read`."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(start)
                data = stream.read(count)
        except OSError as error:
            raise InputError(f"Cannot read {self.path}: {error.strerror}; fetch the file again.") from error
        if len(data) != count:
            raise InputError(f"{self.path} ends at byte {start + len(data)}; fetch the file again.")
        return data


@dataclass(frozen=True, slots=True)
class Folder:
    """A local folder, or one .gguf file, whose place it then is alone."""

    path: Path

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    def files(self) -> list[str]:
        """See `Place.files`."""
        if self.path.is_file():
            return [self.path.name]
        if not self.path.is_dir():
            raise InputError(f"There is no checkpoint folder {self.path}; give the folder that holds config.json.")
        try:
            return sorted(f.name for f in self.path.iterdir() if f.is_file())
        except OSError as error:
            raise InputError(f"{self.path} cannot be read ({error.strerror}); see to its permissions.") from error

    def source(self, name: str) -> FileSource:
        """See `Place.source`."""
        path = self.path if self.path.is_file() else self.path / name
        if path.name != name or not path.is_file():
            raise InputError(f"There is no {name} in {self.path}; give the folder of a complete checkpoint.")
        return FileSource(path)
