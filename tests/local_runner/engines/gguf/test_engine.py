"""The llama.cpp engine through the loop: what DSpark says is what plain decoding says, whatever is drafted."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2
from typer.testing import CliRunner

from local_runner.cli import app
from local_runner.engines.base import Draft, Request
from local_runner.engines.gguf import LlamaEngine
from local_runner.engines.torch import TorchEngine
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Algorithm1, CostCurve, Fixed, Schedule, Threshold
from sglang_dspark.errors import InputError

Make = Callable[..., Path]
Open = Callable[..., LlamaEngine]
PROMPT = (5, 17, 80, 33, 9)
GREEDY = SamplingParams()
SCHEDULES: dict[str, Schedule] = {
    "fixed": Fixed(),
    "threshold": Threshold(0.4),
    "algorithm1": Algorithm1(CostCurve((1, 2, 3, 4, 5, 6), (1.0, 1.1, 1.2, 1.3, 1.4, 1.5))),
}
SAMPLING = {
    "temperature": SamplingParams(temperature=1.2, seed=7),
    "filters": SamplingParams(temperature=1.1, top_k=8, top_p=0.9, min_p=0.02, seed=2),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.3, seed=1),
    "greedy with penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
}


def request(sampling: SamplingParams = GREEDY, schedule: Schedule | None = None, **changes: Any) -> Request:
    return Request(**{"prompt_ids": PROMPT, "max_new_tokens": 60, "sampling": sampling, "schedule": schedule} | changes)


def tokens(rounds: Sequence[Round]) -> list[int]:
    return [t for r in rounds for t in r.committed]


def answer(engine: LlamaEngine, *arguments: Any, **changes: Any) -> list[int]:
    return tokens(list(engine.generate(request(*arguments, **changes))))


@dataclass
class Oracle:
    """Drafts what plain decoding says, each token right with probability `right`."""

    said: list[int]
    right: float
    block: int = 5
    seen: int = 0
    numbers: random.Random = field(default_factory=lambda: random.Random(4))

    def reset(self) -> None:
        self.seen = 0

    def observe(self, count: int) -> None:
        self.seen += count

    def draft(self, anchor: int, position: int, choose: object = None) -> Draft:
        assert self.seen == position
        coming = [*self.said, *[0] * self.block][position - len(PROMPT) + 1 :][: self.block]
        return Draft([t if self.numbers.random() < self.right else (t + 1) % 96 for t in coming])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("architecture", "type_"), [("llama", "Q8_0"), ("qwen3", "F32"), ("gemma3", "Q8_0")])
def test_greedy_decoding_is_plain_decoding(
    architecture: str, type_: str, schedule: str, target: Make, draft: Make, open_: Open
) -> None:
    engine = open_(target(architecture, type_), draft())
    plain = answer(engine)
    rounds = list(engine.generate(request(schedule=SCHEDULES[schedule])))
    assert tokens(rounds) == plain and len(plain) == 60
    assert all(len(r.drafted) == len(r.confidence) == 5 for r in rounds[1:])
    assert all(0 < c < 1 for r in rounds for c in r.confidence)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_drafts_right_and_wrong(architecture: str, right: float, target: Make, open_: Open) -> None:
    """Every length of accepted prefix, and so of rollback."""
    engine = open_(target(architecture, "Q8_0"))
    plain = answer(engine)
    engine.drafter = Oracle(plain, right)
    rounds = list(engine.generate(request(schedule=Fixed())))
    assert tokens(rounds) == plain
    assert sum(r.accepted for r in rounds) == (0 if right == 0 else pytest.approx(50 * right, abs=25))


@pytest.mark.parametrize("block", [1, 3, 5])
def test_the_head_drafts_as_it_does_in_the_pytorch_engine(
    block: int, target: Make, draft: Make, open_: Open, load: Callable[..., TorchEngine]
) -> None:
    """The same context, so the same features: in single precision all but near-ties are drafted alike."""
    ours, theirs = open_(target(), draft(), block=block), load(target(), draft(), block=block)
    same = total = 0
    for start in range(4):
        wanted = request(schedule=Fixed(), prompt_ids=tuple((7 * i + start) % 96 for i in range(20)))
        for a, b in zip(ours.generate(wanted), theirs.generate(wanted), strict=False):
            if (a.position, a.anchor) != (b.position, b.anchor):
                break
            same, total = same + (a.drafted == b.drafted), total + 1
            if a.drafted == b.drafted:
                assert a.confidence == pytest.approx(b.confidence, abs=0.03)
    assert total > 60 and same > 0.95 * total


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("params", SAMPLING)
def test_sampling_with_greedy_drafts_is_plain_sampling(
    params: str, schedule: str, target: Make, draft: Make, open_: Open
) -> None:
    engine = open_(target(type_="Q8_0"), draft())
    plain = answer(engine, SAMPLING[params])
    assert answer(engine, SAMPLING[params], SCHEDULES[schedule]) == plain
    assert answer(engine, SAMPLING[params]) == plain


def test_drafts_drawn_from_the_head_are_refused(target: Make, draft: Make, open_: Open) -> None:
    engine = open_(target(), draft())
    wanted = request(SAMPLING["temperature"], Fixed(), draft_style="sampled")
    with pytest.raises(InputError, match="use --draft-style greedy"):
        next(engine.generate(wanted))
    assert len(answer(engine, GREEDY, Fixed(), draft_style="sampled")) == 60


TOP = SamplingParams(temperature=1.3, top_k=3)
N, NEW = 1000, 3


def exact_joint(engine: LlamaEngine) -> dict[tuple[int, ...], float]:
    """The probability of every answer of NEW tokens, from the target's logits and a sampler written out."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW):
        longer: dict[tuple[int, ...], float] = {}
        for said, p in joint.items():
            engine.target.reset()
            row = engine.target.forward([*PROMPT, *said])[-1].double().numpy() / TOP.temperature
            best = np.argsort(-row)[: TOP.top_k]
            weights = np.exp(row[best] - row[best].max())
            longer |= {(*said, int(t)): p * float(w) for t, w in zip(best, weights / weights.sum(), strict=True)}
        joint = longer
    return joint


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "passes"), [(False, True), (True, False)])
def test_sampled_answers_have_the_targets_distribution(
    wrong: bool, passes: bool, target: Make, draft: Make, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """χ² over all answers of three tokens; it fails for a target that gives its rows in the wrong order."""
    engine = open_(target(type_="Q8_0"), draft())
    joint = exact_joint(engine)
    if wrong:
        forward = type(engine.target).forward
        monkeypatch.setattr(type(engine.target), "forward", lambda *a, **o: forward(*a, **o).flip(0))
    observed: dict[tuple[int, ...], int] = dict.fromkeys(joint, 0)
    for seed in range(N):
        said = tuple(answer(engine, SamplingParams(temperature=1.3, top_k=3, seed=seed), Fixed(), max_new_tokens=NEW))
        observed[said] = observed.get(said, 0) + 1
    assert set(observed) == set(joint) or not passes
    expected = np.array([N * joint.get(said, 0.0) for said in observed])
    counts = np.array(list(observed.values()))
    rare = expected < 5
    pooled = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
    kept = pooled[1] > 0
    p = float(chi2.sf((((pooled[0] - pooled[1]) ** 2)[kept] / pooled[1][kept]).sum(), kept.sum() - 1))
    assert (p > 1e-4) == passes


def test_cancelling(target: Make, draft: Make, open_: Open) -> None:
    engine, cancelled = open_(target(), draft()), threading.Event()
    seen = []
    for r in engine.generate(request(schedule=Fixed()), cancelled):
        seen.append(r)
        if r.index == 3:
            cancelled.set()
    assert [r.index for r in seen] == [0, 1, 2, 3] and seen[-1].stop is None
    assert answer(engine, GREEDY, Fixed()) == answer(engine)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("room", [20, 31, 128])
def test_the_context_is_used_to_its_last_position(
    architecture: str, room: int, target: Make, draft: Make, open_: Open
) -> None:
    engine = open_(target(architecture, "Q8_0"), draft(), context_length=room)
    for schedule in (None, Fixed()):
        rounds = list(engine.generate(request(schedule=schedule, max_new_tokens=500)))
        assert rounds[-1].stop == "context" and len(tokens(rounds)) == room - len(PROMPT) + 1


LONG = tuple((13 * i + i // 7) % 96 for i in range(100))


def decoded(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward of the target computes, from now on."""
    counts: list[int] = []
    decode = engine.llama_target.context.decode

    def watch(rows: Sequence[int], position: int, wanted: int) -> None:
        counts.append(len(rows))
        decode(rows, position, wanted)

    monkeypatch.setattr(engine.llama_target.context, "decode", watch)
    return counts


@pytest.mark.parametrize("chunk", [256, 16])
def test_a_shared_prefix_is_not_computed_again(
    chunk: int, target: Make, draft: Make, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that of an engine that saw nothing before, and so are the drafts but for near-ties, because batches
    of other sizes round otherwise; only the rest of the prompt is computed.
    """
    monkeypatch.setattr("local_runner.engines.loop.PREFILL_CHUNK", chunk)
    engine = open_(target(), draft(), reuse_prefix=True)
    fresh = open_(target(), draft())
    counts = decoded(engine, monkeypatch)
    first = request(prompt_ids=LONG[:40], schedule=Fixed(), max_new_tokens=12)
    said = tuple(tokens(list(engine.generate(first))))
    # The next turn of a conversation, another beginning, none at all, the same, a shorter one.
    prompts = [
        ((*LONG[:40], *said, *LONG[60:80]), 40 + len(said) - 1),
        (LONG[:70], 40),
        (LONG[50:], 0),
        (LONG[50:], 49),
        (LONG[50:60], 9),
    ]
    alike = total = 0
    for prompt, shared in prompts:
        counts.clear()
        wanted = request(prompt_ids=prompt, schedule=Fixed(), max_new_tokens=12)
        got, expected = (list(one.generate(wanted)) for one in (engine, fresh))
        assert [r.committed for r in got] == [r.committed for r in expected]
        alike += sum(a.drafted == b.drafted for a, b in zip(got[1:], expected[1:], strict=True))
        total += len(got) - 1
        prefill = sum(counts) - sum(1 + r.scheduled for r in got[1:])
        assert prefill == len(prompt) - shared
    assert alike >= 0.9 * total


def test_a_plain_request_between_leaves_no_stale_drafts(target: Make, draft: Make, open_: Open) -> None:
    """The target then holds tokens whose features the draft never saw."""
    engine = open_(target(type_="Q8_0"), draft(), reuse_prefix=True)
    fresh = open_(target(type_="Q8_0"), draft())
    answer(engine, schedule=Fixed(), prompt_ids=LONG[:50])
    answer(engine, prompt_ids=(*LONG[:20], *LONG[60:90]))
    wanted = request(schedule=Fixed(), prompt_ids=(*LONG[:20], *LONG[60:95]))
    got, expected = (list(one.generate(wanted)) for one in (engine, fresh))
    assert [(r.drafted, r.committed) for r in got] == [(r.drafted, r.committed) for r in expected]
    assert answer(engine, prompt_ids=LONG) == answer(fresh, prompt_ids=LONG)


def test_measuring_leaves_a_usable_engine(target: Make, draft: Make, open_: Open) -> None:
    engine = open_(target(type_="Q8_0"), draft(), reuse_prefix=True)
    plain = answer(engine)
    curve = engine.cost_curve(repeats=2)
    assert curve.rows == (1, 2, 3, 4, 5, 6) and curve.draft_s > 0
    first, second, gap = engine.margin(PROMPT, plain[:5])
    assert first == plain[5] != second and gap > 0
    assert 0 <= engine.width_noise([*PROMPT, *plain]) < 0.05
    assert answer(engine, schedule=Fixed()) == plain


def test_what_it_says_of_itself(target: Make, draft: Make, open_: Open) -> None:
    said = open_(target(type_="Q8_0"), draft(), block=3).description
    assert (said["engine"], said["dtype"], said["draft_dtype"], said["threads"]) == ("gguf", "Q8_0", "F32", 1)
    assert said["target"].endswith(".gguf") and said["draft"].endswith(".gguf")
    assert said["versions"]["llama-cpp-python"] == "0.3.36"
    alone = open_(target())
    assert alone.description["draft"] is None and (alone.block, alone.has_confidence) == (0, False)


def test_text_is_that_of_the_pytorch_engine(target: Make, open_: Open, load: Callable[..., TorchEngine]) -> None:
    ours, theirs = open_(target()), load(target())
    assert ours.stop_ids == theirs.stop_ids == {2}
    for text in ("ab ab", "a!b?", "  ab"):
        said = [{"role": "user", "content": text}]
        assert ours.encode_chat(said) == theirs.encode_chat(said)
        assert ours.decode(ours.encode_chat(said)) == theirs.decode(theirs.encode_chat(said))


def test_a_draft_without_confidence(target: Make, draft: Make, open_: Open) -> None:
    engine = open_(target(type_="Q8_0"), draft(enable_confidence_head=False))
    rounds = list(engine.generate(request(schedule=Fixed())))
    assert not engine.has_confidence and all(r.confidence == () for r in rounds)
    assert tokens(rounds) == answer(engine)


def test_the_command_line(target: Make, draft: Make, tmp_path: Path, library: Any) -> None:
    events = tmp_path / "events.jsonl"
    options = ["--engine", "gguf", "--target", target(), "--draft", draft(), "--prompt-ids", "5,17,80", "--threads", 1]
    result = CliRunner().invoke(app, [*map(str, ["generate", *options, "--max-new-tokens", 20, "--events", events])])
    assert result.exit_code == 0, result.output
    rounds = [Round.from_dict(json.loads(line)) for line in events.read_text().splitlines()]
    assert len(tokens(rounds)) == 20 and rounds[1].drafted


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_golden_runs(golden: Path, open_: Open, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The reference's recorded rounds, as far as half-precision caches let them be the same."""
    write_target = request.getfixturevalue("write")
    folder = golden / "qwen3-vanilla"
    file = write_target(tmp_path / "golden.gguf", folder / "target", "qwen3")
    engine = open_(file, folder / "draft", context_length=200)
    same = total = 0
    for run in json.loads((folder / "golden.json").read_text()):
        wanted = Request(tuple(run["prompt"]), run["max_new_tokens"] + 1, GREEDY, schedule=Threshold(0.0))
        for ours, theirs in itertools.zip_longest(list(engine.generate(wanted))[1:], run["rounds"]):
            total += 1
            if ours is None or theirs is None or (ours.position, ours.anchor) != (theirs["start"], theirs["anchor"]):
                break
            same += list(ours.drafted) == theirs["drafted_full"] and ours.next_token == theirs["next_token"]
            if list(ours.drafted) == theirs["drafted_full"]:
                assert [logit(c) for c in ours.confidence] == pytest.approx(theirs["confidence_logits"], abs=0.05)
    assert total > 40 and same > 0.9 * total


def test_it_says_what_it_takes(target: Make, draft: Make, open_: Open) -> None:
    file = target(type_="F32")
    alone, both = open_(file), open_(file, draft())
    rows = alone.target.context_length
    per_row = alone.target.layers * 2 * 2  # keys and values, in float16, of each layer
    taken = alone.description["memory"]
    assert taken["target"] == file.stat().st_size and set(taken) == {"target", "caches"}
    assert taken["caches"] > 0 and taken["caches"] % (rows * per_row) == 0
    assert both.description["memory"]["caches"] > taken["caches"] and both.description["memory"]["head"] > 0
