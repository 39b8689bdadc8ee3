import io
import json
import threading
from types import ModuleType

from hypothesis import given
from hypothesis import strategies as st

from local_runner.answer import CertainText, answer
from local_runner.engine import Decoding
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_is_cut_before_the_first_stop_string_however_it_arrives(pieces: list[str], stops: list[str]) -> None:
    """Against the whole text: cut where the earliest-ending stop string begins (the earliest beginning among those)."""
    certain = CertainText(stops)
    shown = "".join(certain.push(p) for p in pieces) + certain.finish()
    so_far = whole = "".join(pieces)
    for end in _ends(pieces):
        if any(stop in whole[:end] for stop in stops):
            so_far = whole[: min(whole[:end].find(stop) for stop in stops if stop in whole[:end])]
            break
    assert shown == so_far


def _ends(pieces: list[str]) -> list[int]:
    return [sum(map(len, pieces[: n + 1])) for n in range(len(pieces))]


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    certain = CertainText(["END"])
    assert [certain.push(p) for p in ("one E", "N two ", "EN", "D three")] == ["one ", "EN two ", "", ""]
    assert certain.finish() == ""


def decoding(stop_strings: tuple[str, ...] = ()) -> Decoding:
    return Decoding(max_new_tokens=12, sampling=SamplingParams(), schedule=Fixed(), stop_strings=stop_strings)


def test_an_answer_is_written_as_it_comes_and_every_round_is_an_event(fake: ModuleType) -> None:
    pieces: list[str] = []
    events = io.StringIO()
    engine = fake.FakeEngine()
    got = answer(engine, decoding(), [1], "dspark", cancelled=threading.Event(), write=pieces.append, events=events)
    assert got.text == "".join(pieces) == engine.decode(got.tokens)
    assert len(pieces) == len(got.rounds) > 2
    assert [Round.from_dict(json.loads(line)) for line in events.getvalue().splitlines()] == list(got.rounds)
    assert got.stop == "length" and "12 tokens" in got.statistics() and "τ" in got.statistics()


def test_a_stop_string_that_straddles_rounds_is_not_written(fake: ModuleType) -> None:
    pieces: list[str] = []
    engine = fake.FakeEngine()
    asked = decoding(stop_strings=("turns slow",))
    got = answer(engine, asked, [0], "dspark", cancelled=threading.Event(), write=pieces.append)
    assert got.stop == "stop_string"
    assert "".join(pieces) == got.text == "The lamp "


def test_a_target_without_tokenizer_writes_token_ids(fake: ModuleType) -> None:
    pieces: list[str] = []
    engine = fake.FakeEngine(tokenizer=None)
    got = answer(engine, decoding(), [1], "plain", cancelled=threading.Event(), write=pieces.append)
    assert got.text is None
    assert [int(t) for t in "".join(pieces).split(",")] == got.tokens


def test_cancelling_keeps_what_is_whole(fake: ModuleType) -> None:
    cancelled = threading.Event()

    def write(piece: str) -> None:
        cancelled.set()

    got = answer(fake.FakeEngine(), decoding(), [1], "plain", cancelled=cancelled, write=write)
    assert got.stop == "cancelled" and 1 <= len(got.tokens) <= 2
