"""Where this project keeps what it fetched and made."""

from __future__ import annotations

import os
from pathlib import Path


def store_root() -> Path:
    """`$DSPARK_HOME`, else `$XDG_CACHE_HOME/dspark`, else `~/.cache/dspark`."""
    if home := os.environ.get("DSPARK_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dspark"
