"""A converted head drafts in SGLang the tokens that the golden rounds hold, whatever it was converted to and from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoint_kit import converted
from serving_kit import Server, golden_pair, runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("sglang")]
WAYS = [
    ("qwen3-vanilla", ("sglang",)),
    ("qwen3-vanilla", ("gguf", "deepspec")),
    ("qwen3-gated", ("speculators",)),
    ("qwen3-rnn", ("specforge",)),
]


@pytest.mark.parametrize(("name", "ways"), WAYS, ids=[f"{n}-{'-'.join(w)}" for n, w in WAYS])
def test_drafts_are_the_golden_ones(name: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    target, head = golden_pair(name, tmp_path)
    for number, way in enumerate(ways):
        head = converted(head, way, tmp_path / f"{number}-{way}")
    arguments = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(head)]
    compared = 0
    with Server(target, arguments, tmp_path, {"SGLANG_RAGGED_VERIFY_MODE": "static"}) as server:
        for number, run in enumerate(runs(name)):
            sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": run["max_new_tokens"]}
            body = {"rid": f"run-{number}", "input_ids": run["prompt"], "sampling_params": sampling}
            httpx.post(f"{server.url}/generate", json=body, timeout=300).raise_for_status()
            events = httpx.get(f"{server.url}/dspark/rounds", params={"request": f"run-{number}"}, timeout=300).text
            # What follows a place depends on the text alone, however long the schedule's blocks are.
            golden = {r["start"]: r for r in run["rounds"]}
            for told in map(_round, filter(_is_data, events.splitlines())):
                if (there := golden.get(told.get("position", -1))) and told["drafted"]:
                    assert told["anchor"] == there["anchor"]
                    assert told["drafted"] == there["drafted_full"]
                    compared += 1
    assert compared >= 40


def _is_data(line: str) -> bool:
    return line.startswith("data: {")


def _round(line: str) -> dict[str, Any]:

    said: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return said
