"""What a page asks for, read from JSON that anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from local_runner.engine import Dtype, Kind
from local_runner.options import Settings
from local_runner.pairs import pair_files
from sglang_dspark.errors import InputError

AskKind = Literal["race", "chat", "machine", "replay"]
LANGUAGES = ("en", "ko")

LONGEST_TEXT = 100_000
"""Characters of a prompt, or of a whole conversation."""
MOST_TURNS = 400
MOST_TOKENS = 8192
SCHEDULES = ("adaptive", "fixed", "algorithm1", "threshold:0.3", "threshold:0.5", "threshold:0.7")


@dataclass(frozen=True, slots=True)
class Ask:
    """A race on a prompt, an answer in a conversation, a look at the machine, or a recorded run.

    `conversation` holds {"role", "content"} messages and ends with the user's; `plain` decodes a chat's answer without
    the draft; `language` is that of the sentences in the answer.
    """

    kind: AskKind
    settings: Settings
    conversation: tuple[dict[str, str], ...] = ()
    plain: bool = False
    language: str = "en"

    @property
    def prompt(self) -> str:
        """What the user said last."""
        return self.conversation[-1]["content"] if self.conversation else ""


def read_ask(data: Any, base: Settings) -> Ask:
    """What `data` asks for, on top of the settings that the program was started with.

    Only known pairs can be asked for, so that no page can make the program read a path. Raises InputError with the
    first field that cannot be.
    """
    if not isinstance(data, dict):
        raise InputError("The request is not a JSON object; reload the page.")
    kind = data.get("kind")
    if kind not in ("race", "chat", "machine"):
        raise InputError("The request's 'kind' must be race, chat or machine; reload the page.")
    settings = replace(
        base,
        temperature=_number(data, "temperature", base.temperature, 0, 5),
        top_p=_number(data, "top_p", base.top_p, 0, 1),
        max_new_tokens=int(_number(data, "max_new_tokens", base.max_new_tokens, 2, MOST_TOKENS, whole=True)),
        seed=_whole(data, "seed", base.seed, 0, 2**63 - 1),
        block=_whole(data, "block", base.block, 1, 64),
        engine=_choice(data, "engine", base.engine, get_args(Kind)),
        dtype=_choice(data, "dtype", base.dtype, get_args(Dtype)),
        schedule=_choice(data, "schedule", base.schedule, (*SCHEDULES, base.schedule)),
    )
    if not base.target:
        settings = replace(settings, pair=_choice(data, "pair", base.pair, (*pair_files(), base.pair)))
    return Ask(
        kind=kind,
        settings=settings,
        conversation=() if kind == "machine" else _conversation(data),
        plain=data.get("plain") is True,
        language=data["language"] if data.get("language") in LANGUAGES else "en",
    )


def _conversation(data: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    given = data.get("conversation")
    if not isinstance(given, list) or not 0 < len(given) <= MOST_TURNS:
        raise InputError(f"A conversation needs between 1 and {MOST_TURNS} messages; start anew.")
    messages = []
    for message in given:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise InputError("A message of the conversation has no role or no text; start anew.")
        messages.append({"role": role, "content": content.encode("utf-8", "replace").decode()})
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise InputError("The prompt is empty; say something to answer.")
    if sum(len(m["content"]) for m in messages) > LONGEST_TEXT:
        raise InputError(f"The text is longer than {LONGEST_TEXT:,} characters; shorten it.")
    return tuple(messages)


def _number(
    data: Mapping[str, Any], name: str, default: float, low: float, high: float, *, whole: bool = False
) -> float:
    value = data.get(name)
    if value is None or value == "":
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"'{name}' must be a number from {low} to {high}.")
    if whole and value != int(value):
        raise InputError(f"'{name}' must be a whole number.")
    return value


def _whole(data: Mapping[str, Any], name: str, default: int | None, low: int, high: int) -> int | None:
    if data.get(name) in (None, ""):
        return default
    return int(_number(data, name, 0, low, high, whole=True))


def _choice(data: Mapping[str, Any], name: str, default: Any, choices: tuple[Any, ...]) -> Any:
    value = data.get(name)
    if value is None or value == "":
        return default
    if value not in choices:
        raise InputError(f"'{name}' must be one of {', '.join(str(c) for c in choices if c)}.")
    return value
