"""What is answered, asked by OpenAI's own client: whole and streamed, chat and text, and the Rounds beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from local_runner.engine import Decoding
from sglang_dspark.decoding.rounds import Round, summarise
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

from .conftest import Running, user

GOLDEN = Path(os.environ.get("DSPARK_GOLDEN", Path(__file__).parents[4] / "shared" / "golden")) / "qwen3-vanilla"
TEXT = " turns slowly and the sea below keeps its own time .\ndef beam(angle):\n"
"""Twelve tokens."""


def test_a_chat_is_answered(running: Running, engine: Any) -> None:
    reply = running.client.chat.completions.create(model="fake-pair", messages=[user("hi")], max_tokens=5)
    assert reply.object == "chat.completion" and reply.model == "fake-pair" and reply.id.startswith("chatcmpl-")
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", " turns slowly and the sea")
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (1, 5, 6)
    assert engine.requests[0].schedule is not None and engine.conversations == [[user("hi")]]
    assert running.client.models.list().data[0].id == "fake-pair"
    assert running.client.models.retrieve("fake-pair").id == "fake-pair"


def test_a_stream_says_what_a_whole_answer_says(running: Running) -> None:
    stops = {
        None: TEXT,
        "\n\n": TEXT,  # the end of the text may begin it
        "slow": " turns ",
        ("own", "sea be"): " turns slowly and the ",
        ".": TEXT.partition(".")[0],
    }
    for stop, expected in stops.items():
        asked: dict[str, Any] = {"model": "fake-pair", "messages": [user("hi")], "stop": stop}
        whole = running.client.chat.completions.create(**asked)
        chunks = list(
            running.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks[-3:-1]] == [None, whole.choices[0].finish_reason]
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}
        summary = [c.model_extra["dspark"] for c in chunks if c.model_extra and "dspark" in c.model_extra]
        assert whole.model_extra is not None
        assert [s["summary"] for s in summary] == [whole.model_extra["dspark"]["summary"]]
        assert whole.choices[0].message.content == expected


def test_a_stream_ends_with_done_and_usage_only_where_it_is_asked_for(running: Running) -> None:
    lines = [line for line in running.chat(stream=True).text.splitlines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert all("usage" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_text_and_token_ids_are_continued(running: Running, engine: Any) -> None:
    complete = running.client.completions.create
    text = complete(model="fake-pair", prompt="one three", max_tokens=4)
    ids = complete(model="fake-pair", prompt=[3, 5], max_tokens=4)
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids == (3, 5)
    assert text.choices[0].text == ids.choices[0].text != "" and text.object == "text_completion"
    streamed = list(complete(model="fake-pair", prompt=[3, 5], max_tokens=4, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == ids.choices[0].text
    assert streamed[-1].choices[0].finish_reason == "length" and engine.conversations == []


def test_several_prompts_and_choices_are_answered_in_order(running: Running, engine: Any) -> None:
    asked: dict[str, Any] = {"model": "fake-pair", "prompt": [[1], [2]], "n": 2, "max_tokens": 3, "temperature": 1.0}
    reply = running.client.completions.create(**asked, seed=40)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert [r.prompt_ids for r in engine.requests] == [(1,), (1,), (2,), (2,)]
    assert [r.sampling.seed for r in engine.requests] == [40, 41, 40, 41]
    assert reply.usage is not None and (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 12)
    texts = dict.fromkeys(range(4), "")
    ends = []
    for chunk in running.client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        ends += [chunk.choices[0].index] * (chunk.choices[0].finish_reason is not None)
    assert [texts[c.index] for c in reply.choices] == [c.text for c in reply.choices] and ends == [0, 1, 2, 3]


def test_without_a_seed_every_request_draws_its_own(running: Running, engine: Any) -> None:
    for _ in range(2):
        assert running.chat(temperature=1.0, n=2).status_code == 200
    seeds = [r.sampling.seed for r in engine.requests]
    assert None not in seeds and len(set(seeds)) == 4


def test_the_mode_can_be_chosen_and_rounds_are_told(running: Running, engine: Any) -> None:
    whole = running.chat(dspark={"mode": "dspark", "schedule": "fixed:2", "events": True}).json()
    assert str(engine.requests[0].schedule) == "fixed:2"
    about = whole["dspark"]
    rounds = [Round.from_dict(r) for r in about["rounds"]]
    assert about["summary"] == asdict(summarise(rounds)) and about["mode"] == "dspark" and about["stop"] == ["length"]
    assert about["schedule"] == "fixed:2" and {r.request for r in rounds} == {whole["id"]}
    assert about["summary"]["mean_accepted_length"] > 1 and sum(len(r.committed) for r in rounds) == 12
    streamed = running.chat(dspark={"schedule": "fixed:2", "events": True}, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed if line.startswith("data: {")]
    told = [Round.from_dict(c["dspark"]["round"]) for c in chunks if "round" in c.get("dspark", {})]
    assert [(r.index, r.committed) for r in told] == [(r.index, r.committed) for r in rounds]
    plain = running.chat(dspark={"mode": "plain"}).json()
    assert engine.requests[-1].schedule is None and "rounds" not in plain["dspark"]
    assert plain["choices"] == whole["choices"] and plain["dspark"]["schedule"] is None


def test_without_a_draft_decoding_is_plain(serve: Callable[..., Running], fake: ModuleType) -> None:
    engine = fake.FakeEngine(block=0)
    running = serve(engine)
    assert running.chat().status_code == 200 and engine.requests[0].schedule is None
    refused = running.chat(dspark={"mode": "dspark"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "dspark.mode"


def test_what_a_request_leaves_out_is_as_the_server_says(serve: Callable[..., Running], engine: Any) -> None:
    sampling = SamplingParams(temperature=0.5, top_k=7, seed=1)
    running = serve(engine, decoding=Decoding(6, sampling, Fixed(3), "sampled", ("keeps",)))
    running.chat(top_p=0.5)
    running.chat(temperature=0, stop=["x"], max_completion_tokens=2, seed=None)
    first, second = engine.requests
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.5, 7, 0.5)
    assert (first.max_new_tokens, first.stop_strings, first.draft_style) == (6, ("keeps",), "sampled")
    assert (second.sampling.temperature, second.stop_strings, second.max_new_tokens) == (0, ("x",), 2)
    assert str(second.schedule) == "fixed:3"


def test_texts_of_tokens(running: Running, serve: Callable[..., Running], fake: ModuleType) -> None:
    body = {"tokens": [[0], [1, 2], []]}
    assert running.http.post("/detokenize", json=body).json() == {"text": ["The", " lamp turns", ""]}
    bare = serve(fake.FakeEngine(tokenizer=None))
    assert bare.http.post("/detokenize", json=body).json() == {"text": [" 0", " 1 2", ""]}
    for wrong in ([1], [["a"]], [[True]], [[-1]], [[0] * 70000]):
        assert running.http.post("/detokenize", json={"tokens": wrong}).status_code == 400


def test_golden_runs(serve: Callable[..., Running]) -> None:
    """A real engine without a tokenizer: the recorded tokens, drafted and plain."""
    if not GOLDEN.is_dir():
        pytest.skip(f"there are no golden runs at {GOLDEN}; set DSPARK_GOLDEN to their parent")
    from local_runner.engines.torch import load_engine

    engine = load_engine(
        GOLDEN / "target", GOLDEN / "draft", device="cpu", dtype="float32", threads=1, context_length=200
    )
    running = serve(engine)
    for run in json.loads((GOLDEN / "golden.json").read_text())[:3]:
        asked: dict[str, Any] = {"model": "fake-pair", "prompt": run["prompt"], "max_tokens": run["max_new_tokens"] + 1}
        schedule = f"threshold:{run['confidence_threshold']}"
        drafted = running.client.completions.create(
            **asked, extra_body={"dspark": {"schedule": schedule, "events": True}}
        )
        plain = running.client.completions.create(**asked, extra_body={"dspark": {"mode": "plain"}})
        assert drafted.model_extra is not None
        rounds = [Round.from_dict(r) for r in drafted.model_extra["dspark"]["rounds"]]
        assert [t for r in rounds for t in r.committed][:-1] == run["output"]
        assert [r.accepted for r in rounds[1:]] == [r["accepted"] for r in run["rounds"]]
        assert drafted.choices[0].text.split()[:-1] == [str(t) for t in run["output"]]
        assert plain.choices[0].text == drafted.choices[0].text and plain.usage == drafted.usage
    with pytest.raises(openai.BadRequestError, match="vocabulary") as outside:
        running.client.completions.create(model="fake-pair", prompt=[10**6])
    assert outside.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="no tokenizer"):
        running.client.chat.completions.create(model="fake-pair", messages=[user("hi")])
