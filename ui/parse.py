"""Reading messages that come from anywhere: files, servers, other people. Nothing in them is taken on trust."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError
from ui.messages import (
    LANES,
    RUN_NUMBERS,
    RUN_TEXTS,
    STATES,
    VERSION,
    Message,
    round_message,
    run_message,
    state_message,
    verdict_message,
)

MAX_BLOCK = 256
MAX_TEXT = 200_000
MAX_ITEMS = 64


def parse(data: Any) -> Message | None:
    """The message in `data`, which comes from anywhere: known fields only, each of its type and bounded.

    None stands for a type that is not known. Raises InputError with what is wrong.
    """
    if not isinstance(data, dict):
        raise InputError(f"a message is a JSON object, not {_kind(data)}")
    kind = data.get("type")
    if kind == "run":
        return _run(data)
    if kind == "state":
        return state_message(
            _one_of(data, "state", STATES),
            lane=None if data.get("lane") is None else _one_of(data, "lane", LANES),
            text=_text(data, "text") or "",
            position=_whole(data, "position"),
            fraction=_number(data, "fraction", high=1.0),
        )
    if kind == "round":
        return _round(data)
    if kind == "verdict":
        identical = data.get("identical")
        if identical is not None and not isinstance(identical, bool):
            raise InputError(f"'identical' must be true, false or null, not {_kind(identical)}")
        return verdict_message(
            identical, _number(data, "speedup"), _text(data, "reason") or "", _difference(data.get("first_difference"))
        )
    return None


def parse_round(data: Any) -> Round:
    """The Round in `data`, with every number of its type and finite. Raises InputError with what is wrong."""
    if not isinstance(data, dict):
        raise InputError(f"a round is a JSON object, not {_kind(data)}")
    data = {k: v for k, v in data.items() if k in Round.__dataclass_fields__}
    for name in ("drafted", "committed", "confidence"):
        items = data.get(name)
        if isinstance(items, list) and len(items) > MAX_BLOCK:
            raise InputError(f"'{name}' has {len(items)} items, and more than {MAX_BLOCK} are not read")
        for item in items if isinstance(items, list) else []:
            _check(name, item, float if name == "confidence" else int)
            if name == "confidence" and item > 1:
                raise InputError(f"'confidence' holds {item}, and probabilities end at 1")
    for name in ("index", "position", "anchor", "scheduled", "accepted", "next_token"):
        _check(name, data.get(name, 0), int)
    for name in ("draft_s", "verify_s"):
        _check(name, data.get(name, 0), float)
    data["request"] = _text(data, "request") or ""
    return Round.from_dict(data)


def _run(data: Message) -> Message:
    if data.get("version") != VERSION:
        raise InputError(f"the recording has version {data.get('version')!r}, and version {VERSION} is read")
    lanes = data.get("lanes")
    if not (isinstance(lanes, list) and lanes and all(lane in LANES for lane in lanes)):
        raise InputError(f"'lanes' must be a list of {' and '.join(LANES)}")
    sampling = data.get("sampling")
    plain = isinstance(sampling, dict) and len(sampling) <= MAX_ITEMS
    return run_message(
        **{name: _text(data, name) for name in RUN_TEXTS},
        **{name: _whole(data, name) for name in RUN_NUMBERS},
        sampling={str(k): v for k, v in sampling.items() if isinstance(v, int | float)} if plain and sampling else None,
        memory=_memory(data.get("memory")),
        lanes=[lane for lane in LANES if lane in lanes],
    )


def _memory(parts: Any) -> list[Message] | None:
    if parts is None:
        return None
    if not isinstance(parts, list) or len(parts) > MAX_ITEMS or not all(isinstance(p, dict) for p in parts):
        raise InputError(f"'memory' must be a list of at most {MAX_ITEMS} objects")
    return [{"part": _text(p, "part"), "bytes": _whole(p, "bytes") or 0, "pool": _text(p, "pool")} for p in parts]


def _round(data: Message) -> Message:
    round_ = parse_round(data.get("round"))
    texts = []
    for name, tokens in (("pieces", round_.committed), ("ghosts", round_.drafted)):
        items = data.get(name)
        if not isinstance(items, list) or len(items) != len(tokens):
            raise InputError(f"'{name}' must be a list of {len(tokens)} texts, one for each token")
        texts.append([_text({name: item}, name) or "" for item in items])
    return round_message(_one_of(data, "lane", LANES), round_, *texts)


def _difference(data: Any) -> Message | None:
    if data is None:
        return None
    if not isinstance(data, dict):
        raise InputError(f"'first_difference' is an object or null, not {_kind(data)}")
    return {
        "position": _whole(data, "position"),
        "margin": _number(data, "margin"),
        "noise": _number(data, "noise"),
        "numerics": data.get("numerics") is True,
    }


def _one_of(data: Message, name: str, values: Sequence[Any]) -> Any:
    if data.get(name) not in values:
        raise InputError(f"'{name}' must be one of {', '.join(values)}")
    return data[name]


def _text(data: Message, name: str) -> str | None:
    """A text or null; halves of surrogate pairs, which no encoding can hold, become U+FFFD."""
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(f"'{name}' must be text, not {_kind(value)}")
    if len(value) > MAX_TEXT:
        raise InputError(f"'{name}' has {len(value)} characters, and more than {MAX_TEXT} are not read")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _whole(data: Message, name: str) -> int | None:
    value = data.get(name)
    if value is not None:
        _check(name, value, int)
    return value


def _number(data: Message, name: str, high: float = math.inf) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    _check(name, value, float)
    if value > high:
        raise InputError(f"'{name}' is {value}, and must be at most {high}")
    return float(value)


def _check(name: str, value: Any, kind: type[int] | type[float]) -> None:
    """Raises InputError unless `value` is a finite number of `kind`, not negative, that JavaScript can hold."""
    right = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not right or not 0 <= value < 2**53:
        article = "a whole number" if kind is int else "a number"
        raise InputError(f"'{name}' must be {article} from 0 on, not {value if right else _kind(value)}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
