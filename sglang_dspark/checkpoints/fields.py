"""Typed reading of the fields of a config.json, with errors that name the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.checkpoints.words import brief
from sglang_dspark.errors import InputError

MOST = (1 << 31) - 1
"""No size, count or token id of a real model is larger."""


class Fields:
    """A parsed config.json whose fields are read by type. A null counts as absent, as transformers writes it.

    `spelled` says how the file itself spells a field that was translated, for errors.
    """

    def __init__(self, data: Mapping[str, Any], path: Path | str, spelled: Mapping[str, str] | None = None) -> None:
        self._data = data
        self.path = path
        self._spelled = spelled or {}

    def get(self, name: str, default: Any = None) -> Any:
        """The field as it stands, or `default`."""
        value = self._data.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """An integer of at least `least`; required without a default. One above `most` is an error too."""
        value = self.get(name, default)
        if type(value) is not int or value < least:
            raise self.error(name, f"an integer of at least {least}")
        if value > most:
            raise self.error(name, f"an integer of at most {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required without a default."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.error(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false; required without a default."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required without a default."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, empty when absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return value

    def listed(self, name: str, item: type, default: list[Any] | None = None) -> list[Any]:
        """A list of `item`; required without a default."""
        value = self.get(name, default)
        if not isinstance(value, list) or not all(type(v) is item for v in value):
            raise self.error(name, f"a list of {item.__name__}")
        return value

    def error(self, name: str, needed: str) -> InputError:
        """The error for a field that is absent or of another kind."""
        known = self._spelled.get(name, name)
        if self.get(name) is None:
            return InputError(f"{self.path} lacks '{known}', which must be {needed}; give a complete checkpoint.")
        return InputError(f"'{known}' in {self.path} is {brief(self.get(name))} but must be {needed}.")
