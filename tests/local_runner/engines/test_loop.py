"""Where the decoding loop ends, what it commits, and what it asks of targets and drafters that are tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from local_runner.engines import loop
from local_runner.engines.base import Draft, Request
from local_runner.engines.loop import decode
from local_runner.engines.text import TextStream
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import Purpose, SamplingParams, uniforms
from sglang_dspark.decoding.schedule import Algorithm1, CostCurve, Fixed, Schedule, Threshold
from sglang_dspark.errors import InputError

PROMPT = (1, 4, 1)
GREEDY = SamplingParams()
SAMPLING = {
    "temperature": SamplingParams(temperature=0.8, seed=3),
    "filters": SamplingParams(temperature=1.1, top_k=5, top_p=0.9, min_p=0.05, seed=4),
    "penalties": SamplingParams(
        temperature=0.9,
        top_p=0.85,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.05,
        logit_bias={2: 1.0, 5: -0.7},
        seed=-5,
    ),
    "greedy with penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.3, logit_bias={0: 0.5}),
}
SCHEDULES: dict[str, Schedule] = {
    "fixed": Fixed(),
    "none": Fixed(0),
    "threshold": Threshold(0.5),
    "algorithm1": Algorithm1(CostCurve((1, 2, 3, 4), (1.0, 1.1, 1.3, 1.5))),
}

Tables = Callable[..., tuple[Any, Any]]


def request(sampling: SamplingParams = GREEDY, schedule: Schedule | None = None, **changes: Any) -> Request:
    return Request(**{"prompt_ids": PROMPT, "max_new_tokens": 40, "sampling": sampling, "schedule": schedule} | changes)


def tokens(rounds: Sequence[Round]) -> list[int]:
    return [t for r in rounds for t in r.committed]


def greedy_chain(table: Any, count: int, start: Sequence[int] = PROMPT) -> list[int]:
    """What greedy decoding of a table must say."""
    said = list(start)
    for _ in range(count):
        said.append(int(table[said[-2], said[-1]].argmax()))
    return said[len(start) :]


def counting(tables: Tables, vocab: int = 48) -> Any:
    """A target that always says the next number."""
    target, _ = tables(vocab=vocab)
    for i in range(vocab):
        target.table[:, i, (i + 1) % vocab] = 100.0
    return target


class Right:
    """Drafts the target's own greedy tokens, so that everything is accepted."""

    block = 5

    def __init__(self, target: Any) -> None:
        self.target, self.context = target, list[int]()

    def reset(self) -> None:
        self.context.clear()

    def observe(self, count: int) -> None:
        self.context += self.target.last[:count]

    def draft(self, anchor: int, position: int, choose: object = None) -> Draft:
        assert choose is None
        return Draft(greedy_chain(self.target.table, self.block, [*self.context[-1:], anchor]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_decoding_follows_the_target(tables: Tables, schedule: str) -> None:
    target, drafter = tables(vocab=24)
    expected = greedy_chain(target.table, 40)
    for one, wanted in ((None, None), (drafter, SCHEDULES[schedule])):
        rounds = list(decode(target, one, request(schedule=wanted)))
        assert tokens(rounds) == expected
        assert [r.stop for r in rounds] == [None] * (len(rounds) - 1) + ["length"]
        assert [r.index for r in rounds] == list(range(len(rounds)))
    said = [*PROMPT, *expected]
    for r in rounds[1:]:
        assert r.anchor == said[r.position] and len(r.drafted) == drafter.block
        assert list(r.committed) == said[r.position + 1 :][: len(r.committed)]
    assert drafter.context == said[: len(drafter.context)] and len(drafter.context) >= len(said) - 1


@pytest.mark.parametrize("style", ["greedy", "sampled"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("params", SAMPLING)
def test_a_seed_fixes_everything(tables: Tables, params: str, schedule: str, style: str) -> None:
    target, drafter = tables()
    wanted = request(SAMPLING[params], SCHEDULES[schedule], draft_style=style, max_new_tokens=60)
    first, second = ([replace(r, draft_s=0.0, verify_s=0.0) for r in decode(target, drafter, wanted)] for _ in range(2))
    assert first == second
    if not wanted.sampling.greedy:
        other = list(decode(target, drafter, replace(wanted, sampling=replace(wanted.sampling, seed=77))))
        assert tokens(other) != tokens(first)


class Same:
    """Drafts from the target's own logits."""

    block = 4

    def __init__(self, target: Any) -> None:
        self.target, self.last = target, 0

    def reset(self) -> None:
        pass

    def observe(self, count: int) -> None:
        self.last = self.target.last[count - 1]

    def draft(self, anchor: int, position: int, choose: Any) -> Draft:
        said = [self.last, anchor]
        for k in range(self.block):
            said.append(choose(k, self.target.table[said[-2], said[-1]]))
        return Draft(said[2:])


@pytest.mark.parametrize("params", SAMPLING)
def test_a_draft_that_is_the_target_is_always_accepted(tables: Tables, params: str) -> None:
    """Both go through the same penalties, biases and filters: p = q in every row, or equal argmaxes."""
    target, _ = tables()
    wanted = request(SAMPLING[params], Fixed(), draft_style="sampled", max_new_tokens=101)
    rounds = list(decode(target, Same(target), wanted))
    assert [r.accepted for r in rounds[1:]] == [4] * 20


def test_without_a_seed_answers_differ(tables: Tables) -> None:
    target, _ = tables()
    assert len({tuple(tokens(list(decode(target, None, request(SamplingParams(1.0)))))) for _ in range(3)}) == 3


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("params", SAMPLING)
def test_greedy_drafts_give_the_stream_of_plain_sampling(tables: Tables, params: str, schedule: str) -> None:
    target, drafter = tables()
    wanted = request(SAMPLING[params], max_new_tokens=200)
    plain = tokens(list(decode(target, None, wanted)))
    rounds = list(decode(target, drafter, replace(wanted, schedule=SCHEDULES[schedule])))
    assert tokens(rounds) == plain
    assert (sum(r.accepted for r in rounds) > 10) == (schedule != "none")


@pytest.mark.parametrize("params", SAMPLING)
def test_plain_sampling_draws_from_the_distribution_that_was_asked_for(tables: Tables, params: str, naive: Any) -> None:
    """Each token is where its position's random number falls in the cumulative distribution, written out anew."""
    target, _ = tables()
    sampling = SAMPLING[params].with_seed()
    said: list[int] = []
    for token in tokens(list(decode(target, None, request(sampling, max_new_tokens=60)))):
        before = [*PROMPT, *said]
        _, probabilities = naive(target.table[before[-2], before[-1]].numpy(), sampling, PROMPT, said)
        assert sampling.seed is not None
        u = float(uniforms(sampling.seed, Purpose.TARGET, len(before), 1))
        assert token == int((probabilities.cumsum() <= u).sum())
        said.append(token)


def test_no_draft_is_verified_below_the_threshold(tables: Tables) -> None:
    target, drafter = tables()
    rounds = list(decode(target, drafter, request(schedule=Threshold(1.0))))
    assert tokens(rounds) == greedy_chain(target.table, 40)
    assert all((r.scheduled, r.accepted, len(r.drafted)) == (0, 0, 3) for r in rounds[1:])
    assert target.calls == [3] + [1] * 39
    target.calls.clear()
    rounds = list(decode(target, drafter, request(SAMPLING["temperature"], Threshold(0.4), max_new_tokens=200)))
    assert {r.scheduled for r in rounds[1:]} == {0, 1, 2, 3}
    assert target.calls[1:] == [1 + r.scheduled for r in rounds[1:]]


def test_a_drafter_is_left_alone_in_plain_decoding(tables: Tables) -> None:
    target, drafter = tables()
    assert len(list(decode(target, drafter, request()))) == 40
    assert drafter.drafts == 0 and drafter.context == []


@pytest.mark.parametrize("count", range(1, 15))
def test_the_answer_is_cut_inside_an_accepted_block(tables: Tables, count: int) -> None:
    target, _ = tables(vocab=24)
    rounds = list(decode(target, Right(target), request(schedule=Fixed(), max_new_tokens=count)))
    assert tokens(rounds) == greedy_chain(target.table, count)
    assert [len(r.committed) for r in rounds] == [1] + [6] * ((count - 1) // 6) + [(count - 1) % 6] * (
        (count - 1) % 6 > 0
    )
    assert rounds[-1].stop == "length"
    assert rounds[-1].accepted == (5 if count > 1 else 0)


@pytest.mark.parametrize("at", range(8))
def test_a_stop_token_ends_the_answer_wherever_it_stands(tables: Tables, at: int) -> None:
    target = counting(tables)
    expected = list(range(2, 10))
    for drafter, schedule in ((None, None), (Right(target), Fixed())):
        stops = frozenset({expected[at], 47})
        rounds = list(decode(target, drafter, request(schedule=schedule, stop_ids=stops)))
        assert tokens(rounds) == expected[: at + 1]
        assert [r.stop for r in rounds] == [None] * (len(rounds) - 1) + ["eos"]


@pytest.mark.parametrize("room", [*range(4, 18), 23])
def test_the_context_is_used_to_its_last_position(tables: Tables, room: int) -> None:
    """The last token needs no room, because nothing follows it; a block that would not fit is verified in part."""
    target, _ = tables(vocab=24, context_length=room)
    expected = greedy_chain(target.table, room - len(PROMPT) + 1)
    for drafter, schedule in ((None, None), (Right(target), Fixed()), (Right(target), Fixed(3))):
        rounds = list(decode(target, drafter, request(schedule=schedule)))
        assert tokens(rounds) == expected
        assert rounds[-1].stop == "context" and all(r.stop is None for r in rounds[:-1])
        assert target.length == room
    clipped = rounds[-1]
    assert clipped.scheduled == min(3, room - clipped.position - 1) and len(clipped.drafted) == 5


def test_the_wanted_length_comes_before_the_end_of_the_context(tables: Tables) -> None:
    target, _ = tables(vocab=24, context_length=10)
    rounds = list(decode(target, None, request(max_new_tokens=8)))
    assert (len(tokens(rounds)), rounds[-1].stop) == (8, "length")


def test_cancelling_between_rounds(tables: Tables) -> None:
    target, drafter = tables()
    cancelled = threading.Event()
    seen = []
    for r in decode(target, drafter, request(schedule=Fixed()), cancelled=cancelled):
        seen.append(r)
        if r.index == 2:
            cancelled.set()
    assert [r.index for r in seen] == [0, 1, 2] and seen[-1].stop is None


def test_cancelling_during_prefill(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PREFILL_CHUNK", 2)
    target, drafter = tables()
    cancelled = threading.Event()
    observe = drafter.observe

    def cancel_after_two(count: int) -> None:
        observe(count)
        if len(target.calls) == 2:
            cancelled.set()

    monkeypatch.setattr(drafter, "observe", cancel_after_two)
    wanted = request(schedule=Fixed(), prompt_ids=(1, 2, 3, 4, 5, 0, 1))
    assert list(decode(target, drafter, wanted, cancelled=cancelled)) == []
    assert target.calls == [2, 2]


def test_a_request_starts_afresh_after_one_that_was_left(tables: Tables) -> None:
    target, drafter = tables()
    wanted = request(SAMPLING["penalties"], Fixed(), draft_style="sampled")
    expected = tokens(list(decode(target, drafter, wanted)))
    left = decode(target, drafter, request(schedule=Fixed()))
    assert [next(left).index for _ in range(3)] == [0, 1, 2]
    assert tokens(list(decode(target, drafter, wanted))) == expected


@pytest.mark.parametrize("stop_at", range(12))
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_a_stop_string_ends_the_answer_wherever_it_stands(tables: Tables, stop_at: int, length: int) -> None:
    """Also across rounds and inside accepted drafts; the answer is plain decoding's, to the token."""
    target = counting(tables)

    def text(ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + t) for t in ids)

    expected = list(range(2, 22))
    stop = text(expected)[stop_at : stop_at + length]
    for drafter, schedule in ((None, None), (Right(target), Fixed()), (Right(target), Fixed(2))):
        wanted = request(schedule=schedule, stop_strings=(stop, "never"), max_new_tokens=25)
        rounds = list(decode(target, drafter, wanted, text))
        assert tokens(rounds) == expected[: stop_at + length]
        assert [r.stop for r in rounds] == [None] * (len(rounds) - 1) + ["stop_string"]


def test_a_stop_string_may_begin_in_the_middle_of_a_token(tables: Tables) -> None:
    target, _ = tables(vocab=24)
    expected = greedy_chain(target.table, 10)

    def text(ids: Sequence[int]) -> str:
        return "".join(f"<{t}>" for t in ids)

    stop = text(expected[:4])[-3:] + text(expected[4:6])[:2]
    rounds = list(decode(target, Right(target), request(schedule=Fixed(), stop_strings=(stop,)), text))
    assert rounds[-1].stop == "stop_string"
    assert text(tokens(rounds)).find(stop) >= 0 and text(tokens(rounds)[:-1]).find(stop) < 0


def in_bytes(text: str) -> Callable[[Sequence[int]], str]:
    """A tokenizer whose tokens are the bytes of `text`, one after the other."""
    data = text.encode()
    return lambda ids: bytes(data[t] for t in ids).decode(errors="replace")


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_characters_of_several_bytes_come_whole(cut: int) -> None:
    said = "naïve 🌊 über\n日本語 ok"
    stream = TextStream(in_bytes(said))
    ids = list(range(len(said.encode())))
    pieces = [stream.push(ids[i : i + cut]) for i in range(0, len(ids), cut)]
    assert "".join(pieces) == said
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert pieces.count("") > 0 or cut == 5


def test_a_stop_string_of_several_bytes(tables: Tables) -> None:
    said = "ab 日本🌊 cd"
    count = len(said.encode())
    target = counting(tables, count)  # the answer counts up from 1, and so spells `said` without its first letter
    for drafter, schedule in ((None, None), (Right(target), Fixed()), (Right(target), Fixed(1))):
        stream = TextStream(in_bytes(said))
        wanted = request(schedule=schedule, stop_strings=("本🌊",), prompt_ids=(3, 0))
        rounds = list(decode(target, drafter, wanted, stream.push))
        assert tokens(rounds) == list(range(1, len("ab 日本🌊".encode())))
        assert rounds[-1].stop == "stop_string"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_ids": ()}, "The prompt is empty"),
        ({"prompt_ids": (1,) * 12}, "The prompt has 12 tokens, which leaves no room in a context of 12"),
        ({"prompt_ids": (1, 6)}, "Prompt token 6 is outside the target's vocabulary of 6 tokens"),
        ({"prompt_ids": (-1, 1)}, "Prompt token -1 is outside"),
        ({"max_new_tokens": 0}, "must be at least 1, not 0"),
        ({"schedule": Fixed()}, "DSpark needs a draft model"),
        ({"draft_style": "wild"}, "The draft style is 'wild'"),
        ({"stop_strings": ("x",)}, "Stop strings need the target's tokenizer"),
        ({"sampling": SamplingParams(logit_bias={6: 1.0})}, "logit_bias names token 6"),
    ],
)
def test_refused_before_anything_runs(tables: Tables, changes: dict[str, Any], says: str) -> None:
    target, _ = tables(context_length=12)
    with pytest.raises(InputError, match=says):
        list(decode(target, None, request(**changes)))
    assert target.calls == []
    assert len(list(decode(target, None, request(prompt_ids=(1,) * 11)))) == 2
