"""Recorded runs: files of messages, or of bare Rounds as `dspark generate --events` and `race --record` write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dspark.decoding.rounds import Round, summarise
from sglang_dspark.errors import InputError
from ui.messages import (
    LANES,
    Lane,
    LaneWriter,
    Message,
    lane_rounds,
    run_message,
    state_message,
    verdict_message,
)
from ui.parse import parse, parse_round

MAX_BYTES = 64 * 2**20
MAX_LINES = 200_000


class Ids:
    """Stands in for a detokeniser where there is none: a token's text is its id."""

    def push(self, tokens: Sequence[int]) -> str:
        """The ids of `tokens`."""
        return "".join(f" {token}" for token in tokens)


def read(*paths: Path) -> list[Message]:
    """The messages of one recording, or of one or two files of bare Rounds, one for each lane.

    Raises InputError that names the file and the line of what cannot be read.
    """
    found = [_read(path) for path in paths]
    rounds = [content for content in found if content and isinstance(content[0], Round)]
    if not rounds:
        if len(paths) != 1:
            raise InputError(f"{len(paths)} recordings were given; give one, or two files of rounds.")
        return _complete([m for m in found[0] if not isinstance(m, Round)], paths[0])
    if len(rounds) != len(paths) or len(paths) > len(LANES):
        raise InputError("Give one recording, or at most two files of rounds: one of plain decoding, one of DSpark.")
    lanes: dict[Lane, list[Round]] = {}
    for path, content in zip(paths, found, strict=True):
        own = [r for r in content if isinstance(r, Round)]
        lane: Lane = "dspark" if any(r.drafted for r in own) else "plain"
        if lane in lanes:
            raise InputError(f"{path} is a second {lane} lane; give one file of plain decoding and one of DSpark.")
        lanes[lane] = own
    return _from_rounds(lanes)


def compare(plain: Sequence[Round], dspark: Sequence[Round], reason: str = "") -> Message:
    """The verdict that rounds alone allow: whether the tokens are the same, and how the speeds compare."""
    one, two = ([t for r in rounds for t in r.committed] for rounds in (plain, dspark))
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    same = one == two
    difference = None if same else {"position": at, "margin": None, "noise": None, "numerics": False}
    slow, fast = summarise(plain).tokens_per_s, summarise(dspark).tokens_per_s
    return verdict_message(same, fast / slow if slow and fast else None, reason, difference)


def _from_rounds(lanes: dict[Lane, list[Round]]) -> list[Message]:
    names: list[Lane] = [lane for lane in LANES if lane in lanes]
    block = max((len(r.drafted) for rounds in lanes.values() for r in rounds), default=0)
    messages = [run_message(title="Recorded rounds", block=block or None, lanes=names)]
    for lane in names:
        writer = LaneWriter(lane, Ids())
        messages += [writer.message(r) for r in lanes[lane]]
    if len(names) == len(LANES):
        messages.append(compare(lanes["plain"], lanes["dspark"]))
    return [*messages, state_message("finished")]


def _complete(messages: list[Message], path: Path) -> list[Message]:
    """A recording with a run at its head, and an end."""
    if not any(m["type"] == "round" for m in messages):
        raise InputError(f"{path} holds no rounds; give a recording of a run, or a file that --events wrote.")
    if messages[0]["type"] != "run":
        raise InputError(f"{path} does not start with a run; a recording's first line is of type 'run'.")
    ended = any(m["type"] == "state" and m["lane"] is None and m["state"] != "running" for m in messages[-3:])
    return messages if ended else [*messages, state_message("finished")]


def _read(path: Path) -> list[Message | Round]:
    """The known messages of a file, or its Rounds."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"{path} has {size} bytes, and recordings of more than {MAX_BYTES} are not read.")
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); give a recording, one JSON object a line."
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8, so it is no recording of a run.") from error
    if len(lines) > MAX_LINES:
        raise InputError(f"{path} has {len(lines)} lines, and recordings of more than {MAX_LINES} are not read.")
    found: list[Message | Round] = []
    kinds: set[type] = set()
    before: dict[str, Round] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = _item(line)
            if item is None:
                continue
            _follows(item, before)
        except InputError as error:
            sentence = str(error).rstrip(".")
            raise InputError(f"Line {number} of {path} cannot be read: {sentence}.") from error
        kinds.add(type(item))
        if len(kinds) > 1:
            raise InputError(f"Line {number} of {path} mixes bare rounds with messages; a recording holds one kind.")
        found.append(item)
    return found


def _item(line: str) -> Message | Round | None:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("it is not JSON") from error
    bare = isinstance(data, dict) and "type" not in data and "committed" in data
    return parse_round(data) if bare else parse(data)


def _follows(item: Message | Round, before: dict[str, Round]) -> None:
    """Raises InputError if a round does not come after the one before it in its lane."""
    if isinstance(item, Round):
        lane, round_ = "", item
    elif item["type"] == "round":
        lane = item["lane"]
        round_ = lane_rounds([item], lane)[0]
    else:
        return
    if lane in before and round_.index <= before[lane].index:
        raise InputError(f"round {round_.index} follows round {before[lane].index} of the same lane")
    before[lane] = round_
