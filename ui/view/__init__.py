"""The race view: a style sheet and a script that turn messages (see `ui.messages`) into two lanes on one clock.

    const view = DSparkView.mount(element, {language: "en", replay: false, autoplay: true})
    view.feed(messages)      append messages; each costs the same however many came before
    view.reset()             back to the empty state
    view.play() .pause() .seek(seconds) .speed(factor) .end() .language(code) .text(lane)

Without `replay` the view follows a run as it happens, and plays it back on one clock when it is over; with it, a
recording is played back at once. The script needs nothing but a browser, and the page no other file.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

PARTS = ("tokens.js", "charts.js", "skeleton.js", "around.js", "clock.js", "view.js")


def script() -> str:
    """The script, strings of all languages included; it defines `DSparkView`."""
    body = "\n".join(_read(name) for name in PARTS)
    return f'(() => {{\n"use strict";\nconst STRINGS = {json.dumps(strings(), ensure_ascii=False)};\n{body}\n}})();\n'


def css() -> str:
    """The style sheet; all of its rules are about what is inside `.dspark`."""
    return _read("view.css")


def strings() -> dict[str, Any]:
    """The texts of the view: language code -> name -> text."""
    loaded: dict[str, Any] = json.loads(_read("strings.json"))
    return loaded


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
