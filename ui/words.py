"""The page around the view: its words in each language, its script and its style sheet, all in `page/`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

PAGE = Path(__file__).with_name("page")


@cache
def table() -> dict[str, dict[str, str]]:
    """All words: language code -> name -> text."""
    loaded: dict[str, dict[str, str]] = json.loads((PAGE / "strings.json").read_text(encoding="utf-8"))
    return loaded


def words(language: str) -> dict[str, str]:
    """The words of `language`, or the English ones where there is none."""
    return table().get(language, table()["en"])


def script() -> str:
    """The page's script, words of all languages included; it needs `DSparkView` and defines `dspark`."""
    body = (PAGE / "page.js").read_text(encoding="utf-8")
    return f'(() => {{\n"use strict";\nconst WORDS = {json.dumps(table(), ensure_ascii=False)};\n{body}\n}})();\n'


def css() -> str:
    """The page's style sheet."""
    return (PAGE / "page.css").read_text(encoding="utf-8")
