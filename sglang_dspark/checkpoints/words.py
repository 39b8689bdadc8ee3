"""What was read from a file, in messages for people: quoted, on one line, and short."""

from __future__ import annotations

from typing import Any


def brief(value: Any, most: int = 80) -> str:
    """The representation of `value`, cut after `most` characters; control characters and surrogates are escaped."""
    return cut(repr(value), most)


def cut(text: str, most: int = 200) -> str:
    """`text` on one line, cut after `most` characters; control characters and surrogates are escaped."""
    line = " ".join(text[: 4 * most].split())
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return shown if len(shown) <= most else f"{shown[:most]}..."
