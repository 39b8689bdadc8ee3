"""Every parameter is honoured, or refused by its name in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from local_runner.engine import Decoding
from local_runner.server.protocol import Served, read_ask
from local_runner.server.refusal import Refused
from sglang_dspark.decoding.sampling import SamplingParams

from .conftest import Running, user


def test_every_parameter_reaches_the_engine(running: Running, engine: Any) -> None:
    running.client.chat.completions.create(
        model="default",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            user("d"),
        ],
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={"5": -1.5, "7": 2},  # type: ignore[dict-item]
        seed=7,
        stop=["x", "y"],
        max_completion_tokens=3,
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "dspark": {"schedule": "fixed:1"}},
        user="me",
        metadata={"a": "b"},
        store=False,
        logprobs=False,
        n=1,
    )
    assert engine.conversations == [
        [
            {"role": "system", "content": "be brief"},
            user("ab"),
            {"role": "assistant", "content": "c"},
            user("d"),
        ]
    ]
    request = engine.requests[0]
    s = request.sampling
    assert (s.temperature, s.top_p, s.presence_penalty, s.frequency_penalty, s.seed) == (0.5, 0.9, 0.2, 0.3, 7)
    assert (s.top_k, s.min_p, s.repetition_penalty, s.logit_bias) == (3, 0.1, 1.1, ((5, -1.5), (7, 2)))
    assert (request.max_new_tokens, request.stop_strings, str(request.schedule)) == (3, ("x", "y"), "fixed:1")
    assert request.stop_ids == engine.stop_ids


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [user("a") | {"name": "me"}]}, "messages[0].name"),
    ({"messages": [user("a") | {"tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({"messages": [user([{"type": "image_url", "image_url": "x"}])]}, "messages[0].content[0].type"),
    ({"model": 5}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"more": 1}}, "stream_options.more"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"rid": "a b"}, "rid"),
    ({"dspark": 1}, "dspark"),
    ({"dspark": {"mode": "fast"}}, "dspark.mode"),
    ({"dspark": {"schedule": "often"}}, "dspark.schedule"),
    ({"dspark": {"schedule": "algorithm1"}}, "dspark.schedule"),
    ({"dspark": {"schedule": "threshold:0.5"}}, "dspark.schedule"),
    ({"dspark": {"mode": "plain", "schedule": "fixed"}}, "dspark.schedule"),
    ({"dspark": {"user": "me"}}, "dspark.user"),
]
TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 2}, "n"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"logprobs": 0}, "logprobs"),
    ({"messages": [user("a")]}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), CHAT, ids=lambda v: v if isinstance(v, str) else "")
def test_chat_parameters_are_refused_by_name(running: Running, engine: Any, body: dict[str, Any], param: str) -> None:
    refused(running, engine, "chat/completions", {"messages": [user("hi")], **body}, param)


@pytest.mark.parametrize(("body", "param"), TEXT, ids=lambda v: v if isinstance(v, str) else "")
def test_text_parameters_are_refused_by_name(running: Running, engine: Any, body: dict[str, Any], param: str) -> None:
    refused(running, engine, "completions", {"prompt": "hi", **body}, param)


def refused(running: Running, engine: Any, path: str, body: dict[str, Any], param: str) -> None:
    """400, one sentence that names the parameter, and nothing decoded."""
    # Written here, because clients refuse to send some of it.
    headers = {"Content-Type": "application/json"}
    response = running.http.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param.rpartition(".")[2].partition("[")[0] in error["message"] and engine.requests == []


def test_an_unknown_model_is_not_found(running: Running) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        running.client.chat.completions.create(model="gpt-4", messages=[user("hi")])
    assert error.value.code == "model_not_found" and "fake-pair" in error.value.message
    assert running.http.get("/v1/models/gpt-4").status_code == 404


def test_what_asks_for_nothing_is_accepted(running: Running) -> None:
    nothing: dict[str, Any] = {
        "logprobs": False, "top_logprobs": None, "tools": [], "tool_choice": "auto", "frobnicate": None, "user": "me",
        "response_format": {"type": "text"}, "service_tier": "auto", "stream_options": None, "stop": [], "dspark": {},
    }  # fmt: skip
    assert running.chat(**nothing).status_code == 200
    # What a client sends back of an answer of ours.
    answer = running.client.chat.completions.create(model="default", messages=[user("hi")]).choices[0].message
    assert running.chat(messages=[user("hi"), answer.model_dump(), user("more")]).status_code == 200


def test_what_the_engine_refuses_names_the_prompt(running: Running) -> None:
    for stream in (False, True):
        long = running.http.post("/v1/completions", json={"prompt": [1] * 5000, "stream": stream})
        assert long.status_code == 400 and long.json()["error"]["param"] == "prompt"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "stop", "max_tokens", "max_completion_tokens", "n", "stream",
    "stream_options", "dspark", "rid", "logprobs", "tools", "user",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5) | JSON, st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_comes_is_understood_or_refused(engine: Any, body: Any, chat: bool) -> None:
    served = Served(engine, "fake-pair", Decoding(5, SamplingParams(), None), "dspark")
    if isinstance(body, dict):
        body = {"messages": [user("a")], **body} if chat else {"prompt": "a", **body}
    try:
        ask = read_ask(body, "chat" if chat else "text", served)
    except Refused as error:
        assert error.status in (400, 404) and str(error).endswith(".")
    else:
        assert ask.choices >= 1 and ask.decoding.max_new_tokens >= 1
        for choice in range(ask.choices):
            ask.seeded(choice)
