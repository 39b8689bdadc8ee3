import json
from typing import Any

import pytest

from local_runner.options import Settings
from sglang_dspark.errors import InputError
from ui.ask import LONGEST_TEXT, read_ask

TURN = {"role": "user", "content": "Why is the sky blue?"}
RACE = {"kind": "race", "conversation": [TURN]}


def test_what_is_left_out_is_as_the_program_was_started() -> None:
    base = Settings(pair="smollm2-135m", temperature=0.7, block=3, seed=5, max_new_tokens=99, schedule="fixed:2")
    ask = read_ask(RACE, base)
    assert ask.settings == base and ask.prompt == TURN["content"] and ask.language == "en" and not ask.plain
    empty = {name: "" for name in ("temperature", "seed", "block", "schedule", "pair")}
    assert read_ask(RACE | empty, base).settings == base


def test_every_control_is_read() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_new_tokens": 12,
        "seed": 3,
        "pair": "smollm2-135m",
        "engine": "torch",
        "dtype": "float32",
        "block": 2,
        "schedule": "threshold:0.5",
        "language": "ko",
        "plain": True,
    }
    ask = read_ask({**RACE, **given, "kind": "chat"}, Settings())
    for name in set(given) - {"language", "plain"}:
        assert getattr(ask.settings, name) == given[name]
    assert ask.language == "ko" and ask.plain and ask.kind == "chat"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "not a JSON object"),
        ({"kind": "replay"}, "'kind' must be"),
        ({"kind": ["race"]}, "'kind' must be"),
        ({"kind": "race"}, "needs between 1 and"),
        ({"kind": "race", "conversation": [TURN] * 401}, "needs between 1 and"),
        ({"kind": "race", "conversation": [{"role": "root", "content": "x"}]}, "no role or no text"),
        ({"kind": "race", "conversation": ["x"]}, "no role or no text"),
        ({"kind": "race", "conversation": [{"role": "user", "content": " \n"}]}, "prompt is empty"),
        ({"kind": "race", "conversation": [TURN, {"role": "assistant", "content": "x"}]}, "prompt is empty"),
        ({"kind": "race", "conversation": [TURN | {"content": "x" * (LONGEST_TEXT + 1)}]}, "longer than"),
        (RACE | {"temperature": -1}, "'temperature' must be a number from 0 to 5"),
        (RACE | {"temperature": json.loads("NaN")}, "'temperature' must be"),
        (RACE | {"temperature": True}, "'temperature' must be"),
        (RACE | {"top_p": "1"}, "'top_p' must be"),
        (RACE | {"max_new_tokens": 1e9}, "'max_new_tokens' must be"),
        (RACE | {"max_new_tokens": 2.5}, "whole number"),
        (RACE | {"seed": -1}, "'seed' must be"),
        (RACE | {"block": 0.5}, "'block' must be"),
        (RACE | {"dtype": "int4"}, "'dtype' must be one of"),
        (RACE | {"schedule": "fixed:10000"}, "'schedule' must be one of"),
        (RACE | {"pair": "/etc"}, "'pair' must be one of"),
        (RACE | {"pair": {"x": 1}}, "'pair' must be one of"),
    ],
)
def test_what_cannot_be_is_said(data: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_ask(data, Settings())


def test_a_page_cannot_choose_a_path_or_a_pair_besides_the_target_that_was_given() -> None:
    base = Settings(target="/models/mine", draft="/models/head")
    ask = read_ask({**RACE, "pair": "smollm2-135m", "target": "/etc", "draft": "/etc", "threads": 99}, base)
    assert ask.settings == base


def test_halves_of_surrogates_do_not_come_through() -> None:
    ask = read_ask({"kind": "race", "conversation": [TURN | {"content": "a\ud800b"}]}, Settings())
    assert ask.prompt == "a?b"
