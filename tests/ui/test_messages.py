import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.decoding.rounds import Round, summarise, survival_by_position
from sglang_dspark.errors import InputError
from ui.messages import (
    LaneWriter,
    lane_rounds,
    lane_text,
    reliability,
    round_message,
    run_message,
    state_message,
    statistics,
    verdict_message,
)
from ui.parse import parse, parse_round

ROUND = Round("r", 1, 9, 4, (5, 6, 7), (0.9, 0.5, 0.2), 2, 1, 8, (5, 8), None, 0.01, 0.02)
MESSAGE = round_message("dspark", ROUND, [" a", "b"], ["a", "c", "d"])


class Bytes:
    """A detokeniser of bytes, which holds back those of a character that is not complete."""

    def __init__(self) -> None:
        self.held = b""

    def push(self, tokens: Sequence[int]) -> str:
        self.held += bytes(tokens)
        try:
            text = self.held.decode()
        except UnicodeDecodeError:
            return ""
        self.held = b""
        return text


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def of(committed: bytes, drafted: bytes = b"", index: int = 1) -> Round:
    accepted = len(committed) - 1 if drafted else 0
    return Round(
        "r", index, 9, 0, tuple(drafted), (), accepted, accepted, committed[-1], tuple(committed), None, 0, 0.1
    )


def test_a_character_of_several_tokens_is_the_piece_of_the_last() -> None:
    wave = "🌊".encode()
    writer = LaneWriter("dspark", Bytes(), decode)
    first = writer.message(of(b"a" + wave[:2], b"a" + wave[:1] + b"zz"))
    second = writer.message(of(wave[2:] + b"!", wave[2:]))
    assert first["pieces"] == ["a", "", ""]
    assert second["pieces"] == ["", "🌊", "!"]
    assert writer.text == lane_text([first, second], "dspark") == "a🌊!"


def test_ghosts_are_texts_after_what_was_committed() -> None:
    wave = "🌊".encode()
    writer = LaneWriter("dspark", Bytes(), decode)
    writer.message(of(b"x"))
    assert writer.message(of(b"a" + wave[:1], b"a" + wave))["ghosts"] == ["a", "", "", "", "🌊"]


def test_without_a_tokenizer_ghosts_are_ids() -> None:
    assert LaneWriter("dspark", Bytes()).message(of(b"ab", b"ac"))["ghosts"] == [" 97", " 99"]


MESSAGES = [
    run_message(
        id="1", prompt="p", block=7, sampling={"temperature": 0.5}, memory=[{"part": "x", "bytes": 1, "pool": None}]
    ),
    state_message("queued", position=2),
    state_message("downloading", text="of 5 MB", fraction=0.5),
    MESSAGE,
    verdict_message(True, 1.5, "so"),
    verdict_message(False, None, "", {"position": 3, "margin": 0.1, "noise": 0.2, "numerics": True}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: str(m["type"]))
def test_what_is_written_is_read(message: dict[str, Any]) -> None:
    assert parse(json.loads(json.dumps(message))) == message


def test_a_message_of_rounds_gives_them_back() -> None:
    assert lane_rounds([MESSAGE, json.loads(json.dumps(MESSAGE))], "dspark") == [ROUND, ROUND]
    assert lane_rounds([MESSAGE], "plain") == []


def test_a_run_has_no_other_fields() -> None:
    with pytest.raises(TypeError, match="promt"):
        run_message(promt="x")


def test_unknown_types_and_fields_are_ignored() -> None:
    assert parse({"type": "applause"}) is None
    assert parse({**MESSAGE, "colour": "red", "round": {**MESSAGE["round"], "html": "<b>"}}) == MESSAGE


LISTS: dict[str, Any] = json.loads(json.dumps(MESSAGE))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "a list"),
        ({"type": "run", "version": 2, "lanes": ["plain"]}, "version 2"),
        ({"type": "run", "version": 1, "lanes": ["x"]}, "lanes"),
        ({"type": "run", "version": 1, "lanes": []}, "lanes"),
        ({"type": "run", "version": 1, "lanes": ["plain"], "prompt": 3}, "'prompt' must be text"),
        ({"type": "run", "version": 1, "lanes": ["plain"], "memory": {}}, "memory"),
        ({"type": "run", "version": 1, "lanes": ["plain"], "block": -1}, "'block'"),
        ({"type": "run", "version": 1, "lanes": ["plain"], "block": True}, "'block'"),
        ({"type": "run", "version": 1, "lanes": ["plain"], "prompt": "x" * 200_001}, "characters"),
        ({"type": "state", "state": "asleep"}, "'state'"),
        ({"type": "state", "state": "running", "lane": "fast"}, "'lane'"),
        ({"type": "state", "state": "loading", "fraction": 2}, "'fraction'"),
        ({"type": "verdict", "identical": "yes"}, "'identical'"),
        ({"type": "verdict", "speedup": float("nan")}, "'speedup'"),
        ({"type": "verdict", "speedup": float("inf")}, "'speedup'"),
        ({"type": "verdict", "first_difference": 3}, "first_difference"),
        ({**LISTS, "lane": "third"}, "'lane'"),
        ({**LISTS, "pieces": ["a"]}, "'pieces'"),
        ({**LISTS, "ghosts": ["a", "b", 3]}, "'ghosts'"),
        ({**LISTS, "round": None}, "null"),
        ({**LISTS, "round": {**LISTS["round"], "drafted": ["5", 6, 7]}}, "'drafted'"),
        ({**LISTS, "round": {**LISTS["round"], "confidence": [0.9, 0.5, 1.5]}}, "'confidence'"),
        ({**LISTS, "round": {**LISTS["round"], "verify_s": "fast"}}, "'verify_s'"),
        ({**LISTS, "round": {**LISTS["round"], "verify_s": -1}}, "'verify_s'"),
        ({**LISTS, "round": {**LISTS["round"], "accepted": 3}}, "inconsistent"),
        ({**LISTS, "round": {**LISTS["round"], "drafted": [1] * 300}}, "300"),
        ({**LISTS, "round": {}}, "lacks"),
    ],
)
def test_what_is_wrong_is_said(data: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        parse(data)
    assert says in str(error.value)


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    message = parse(json.loads(json.dumps({**LISTS, "pieces": ["\ud83c", "ok\udf0a"]})))
    assert message is not None
    "".join(message["pieces"]).encode()
    assert message["pieces"] == ["\ufffd", "ok\ufffd"]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.lists(st.floats(0, 1), min_size=5, max_size=5)),
        max_size=30,
    )
)
def test_reliability_counts_each_token_whose_predecessors_survived(drawn: list[tuple[int, int, list[float]]]) -> None:
    rounds = [
        replace(ROUND, drafted=(1, 2, 3, 4, 5), confidence=tuple(c), scheduled=max(s, a), accepted=a,
                next_token=9, committed=(*range(1, a + 1), 9))
        for s, a, c in drawn
    ]  # fmt: skip
    judged = [
        (c, k < r.accepted) for r in rounds for k, c in enumerate(r.confidence) if k < r.scheduled and k <= r.accepted
    ]
    found = reliability(rounds)
    assert sum(b["count"] for b in found) == len(judged)
    for b in found:
        inside = [(c, kept) for c, kept in judged if min(int(c * 10), 9) == min(int(b["confidence"] * 10 + 1e-9), 9)]
        if len(inside) == b["count"]:
            assert b["accepted"] == pytest.approx(sum(kept for _, kept in inside) / len(inside))
    assert sum(b["count"] * b["accepted"] for b in found) == pytest.approx(sum(kept for _, kept in judged))


def test_the_prefill_has_no_part_in_reliability() -> None:
    assert reliability([replace(ROUND, index=0)]) == []


def test_statistics_are_those_of_rounds() -> None:
    made = statistics([ROUND], 3)
    assert made["survival"] == survival_by_position([ROUND], 3)
    assert {k: made[k] for k in asdict(summarise([ROUND]))} == asdict(summarise([ROUND]))


def test_a_bare_round_is_checked_too() -> None:
    assert parse_round(LISTS["round"]) == ROUND
    with pytest.raises(InputError, match="anchor"):
        parse_round({**LISTS["round"], "anchor": 1.5})


def test_replay_needs_neither_torch_nor_gradio() -> None:
    code = """
import sys
for name in ("torch", "gradio", "transformers", "numpy", "selenium", "PIL"):
    sys.modules[name] = None
import ui.messages, ui.parse, ui.recording, ui.export, ui.view
ui.export.export_html([ui.messages.run_message()])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
