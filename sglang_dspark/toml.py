"""Files that people write: read, or refused in one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from sglang_dspark.errors import InputError


def read_toml(file: Path) -> dict[str, Any]:
    """What is in a TOML file. Raises InputError that names it and says what is wrong with it."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not valid TOML: {error}.") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); give a TOML file.") from error
