"""Our rounds on libllama are those of llama.cpp's own `draft-dspark`, recorded by `scripts/llama_cpp_rounds.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from local_runner.engine import Decoding
from local_runner.engines.gguf import LlamaEngine
from local_runner.engines.gguf.files import converted, read_target_file
from local_runner.store import Resolved
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RECORDED = Path(__file__).parents[4] / "results" / "llama_cpp_rounds.json"
PARTINGS = 1
"""Prompts in which arithmetic may part the two: they prefill and verify in batches of other sizes."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    said: dict[str, Any] = json.loads(RECORDED.read_text())
    return said


@pytest.fixture(scope="module")
def engine(pair: Resolved, open_: Callable[..., LlamaEngine], recorded: dict[str, Any]) -> LlamaEngine:
    assert pair.draft_path is not None
    draft = converted(pair.draft_path, read_target_file(pair.target_path))
    for name, path in (("target", pair.target_path), ("draft", draft)):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest == recorded[f"{name}_sha256"], f"record anew: another {name} than {RECORDED.name} is of"
    return open_(pair.target_path, pair.draft_path)


def test_rounds_are_llama_cpps_own(engine: LlamaEngine, recorded: dict[str, Any]) -> None:
    decoding = Decoding(recorded["tokens"], SamplingParams(), Fixed())
    parted, compared = [], 0
    for entry in recorded["prompts"]:
        ours = list(engine.generate(decoding.request(engine, entry["ids"], "dspark", "0")))
        # The tool's first round begins with the prompt's last token, ours with the first token of the answer; what it
        # drafted there follows from the same features, so rounds are compared from where both stand at one place.
        positions = {r.position: r for r in ours[1:]}
        place = len(entry["ids"]) - 1
        agreed = 0
        for theirs in entry["rounds"]:
            mine = positions.get(place)
            whole = theirs["scheduled"] == engine.block
            if mine is not None and whole and mine.scheduled == engine.block:
                same = list(mine.drafted) == theirs["drafted"]
                if not (same and (mine.accepted, mine.next_token) == (theirs["accepted"], theirs["next_token"])):
                    parted.append(entry["prompt"])
                    break
                agreed += 1
            place += theirs["accepted"] + 1
        compared += agreed
    assert compared >= 100 and len(parted) <= PARTINGS, (compared, parted)
