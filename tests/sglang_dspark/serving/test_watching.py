"""Rounds of a real server: whole, in order, behind its key, counted, and in its metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving_kit import Server, golden_pair, runs, with_tokenizer

from sglang_dspark.decoding.rounds import Round

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("sglang")]

KEY = {"Authorization": "Bearer secret"}
STEEP = {"sample_batch_tokens": [1, 4, 8, 48], "sample_steps_per_sec": [1000.0, 400.0, 150.0, 10.0]}


@pytest.fixture(scope="module", params=["static", "compact"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("watched")
    target, draft = golden_pair("qwen3-vanilla", folder)
    arguments = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(draft)]
    arguments += ["--enable-metrics", "--api-key", "secret"]
    if request.param == "compact":
        (folder / "steep.json").write_text(json.dumps({**STEEP, "max_batch_tokens": 64}))
        arguments += ["--speculative-dspark-sps-table-path", str(folder / "steep.json")]
    environment = {"SGLANG_RAGGED_VERIFY_MODE": request.param}
    with Server(with_tokenizer(target, 192), arguments, folder, environment) as server:
        yield server


def watch(server: Server, request: str | None) -> list[dict[str, Any]]:
    """The rounds of one request until they end."""
    found = []
    with httpx.stream("GET", f"{server.url}/dspark/rounds", params={"request": request}, headers=KEY, timeout=300) as r:
        assert r.status_code == 200
        event = "round"
        for line in r.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                if event == "end":
                    return found
                assert event == "round", event
                found.append(json.loads(line.removeprefix("data: ")))
            elif not line:
                event = "round"
    raise AssertionError("the stream ended by itself")


def ask(server: Server, rid: str, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    body = {"rid": rid, "input_ids": prompt, "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling}}
    reply = httpx.post(f"{server.url}/generate", json=body, headers=KEY, timeout=300)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_rounds_are_the_answer(served: Server) -> None:
    """Of several requests at once, watched as they run or afterwards; and they agree with SGLang's own counts."""
    golden = runs("qwen3-vanilla")
    settings = [{}, {"frequency_penalty": 1.0}, {"temperature": 1.2}, {"stop": ["a"], "ignore_eos": False}]
    with ThreadPoolExecutor(16) as pool:
        for n, sampling in enumerate(settings):
            names = [f"r{n}-{i}" for i in range(len(golden))]
            watched = [pool.submit(watch, served, name) for name in names]
            asked = [
                pool.submit(ask, served, name, run["prompt"], max_new_tokens=40, **sampling)
                for name, run in zip(names, golden, strict=True)
            ]
            for run, name, answer, seen in zip(golden, names, asked, watched, strict=True):
                told, rounds = answer.result(), [Round.from_dict(r) for r in seen.result()]
                assert [r.index for r in rounds] == list(range(len(rounds)))
                assert [t for r in rounds for t in r.committed] == told["output_ids"]
                assert [r.stop for r in rounds[:-1]] == [None] * (len(rounds) - 1)
                assert {r.request for r in rounds} == {name}
                whole = [*run["prompt"], *told["output_ids"]]
                assert all(whole[r.position] == r.anchor for r in rounds)
                assert all(len(r.confidence) == len(r.drafted) == 7 for r in rounds[1:])
                assert not rounds[0].drafted and all(r.verify_s > 0 for r in rounds)
                assert told["meta_info"]["spec_verify_ct"] == len(rounds) - 1
                assert told["meta_info"]["spec_num_correct_drafts"] == sum(r.accepted for r in rounds)
                assert watch(served, name) == [json.loads(r.to_json()) for r in rounds]


def test_it_asks_for_the_key(served: Server) -> None:
    for path in ("/dspark/rounds", "/dspark/snapshot"):
        assert httpx.get(served.url + path, timeout=60).status_code == 401


def test_snapshots_and_metrics_count_the_rounds(served: Server) -> None:
    import time

    def counted() -> dict[str, Any]:
        found = httpx.get(f"{served.url}/dspark/snapshot", headers=KEY, timeout=60).json()
        assert found["dropped"] == 0
        worker: dict[str, Any] = found["workers"][0]
        return worker

    before = counted()
    prompt = runs("qwen3-vanilla")[0]["prompt"]
    meta = ask(served, "counted", prompt, max_new_tokens=40)["meta_info"]
    after = counted()
    assert after["rounds"] - before["rounds"] == meta["spec_verify_ct"]
    assert after["accepted"] - before["accepted"] == meta["spec_num_correct_drafts"]
    assert sum(b["tokens"] for b in after["reliability"]) > 0
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = httpx.get(f"{served.url}/metrics", headers=KEY, timeout=60).text.splitlines()
        told = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("dspark:")}
        if told.get("dspark:rounds_total") == after["rounds"]:
            break
        time.sleep(0.5)
    assert told["dspark:rounds_total"] == after["rounds"]
    accepted = sum(v for name, v in told.items() if name.startswith("dspark:position_accepted_total"))
    assert accepted == after["accepted"]


def test_an_aborted_request_ends_its_rounds(served: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        seen = pool.submit(watch, served, "left")
        body = {"rid": "left", "input_ids": [3, 4, 5], "stream": True}
        body["sampling_params"] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 480}
        with httpx.stream("POST", f"{served.url}/generate", json=body, headers=KEY, timeout=300) as reply:
            next(reply.iter_lines())
        assert Round.from_dict(seen.result(120)[-1]).stop in ("cancelled", "length")
    found = httpx.get(f"{served.url}/dspark/snapshot", headers=KEY, timeout=60).json()
    assert found["listeners"] == 0
