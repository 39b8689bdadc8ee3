"""Servers with DSPARK on a CPU answer as plain greedy decoding does, in every mode and for every kind of draft.

What plain decoding answers is in the golden runs, made without SGLang.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import converted, rewrite
from safetensors.torch import load_file, save_file
from serving_kit import GOLDEN, Server, fits, golden_pair, runs, stream
from transformers import AutoModelForCausalLM

from local_runner.engines.base import Request
from local_runner.engines.torch import load_engine
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("sglang")]

STEEP = {"sample_batch_tokens": [1, 4, 8, 48], "sample_steps_per_sec": [1000.0, 400.0, 150.0, 10.0]}
"""Steps a second by rows verified, so steep that budgets are cut."""


@dataclass(frozen=True)
class Mode:
    """How a server is started: the pair, the format that its draft is given in, and what differs from the defaults."""

    pair: str
    format: str = "deepspec"
    verify: str = "static"
    arguments: tuple[str, ...] = ()
    trims: bool = False
    prefix: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


MODES = {
    "static": Mode("qwen3-vanilla"),
    "compact, pages of 16, chunks, no radix cache": Mode(
        "qwen3-vanilla",
        verify="compact",
        arguments=("--page-size", "16", "--chunked-prefill-size", "16", "--disable-radix-cache"),
        trims=True,
    ),
    "cap-accept, rnn head, SpecForge's early names": Mode(
        "qwen3-rnn", format="specforge", prefix="logit_head.", verify="cap-accept", trims=True
    ),
    "gated head, speculators, pages of 16": Mode("qwen3-gated", format="speculators", arguments=("--page-size", "16")),
    "a block of one row more, which it was not trained for": Mode(
        "qwen3-vanilla", changes={"sample_from_anchor": False}
    ),
    "Gemma 4": Mode("gemma4-vanilla"),
    "Gemma 4, compact, pages of 16": Mode(
        "gemma4-vanilla", verify="compact", arguments=("--page-size", "16"), trims=True
    ),
}


@pytest.fixture(scope="module", params=MODES.values(), ids=list(MODES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mode, Server]]:
    mode: Mode = request.param
    folder = tmp_path_factory.mktemp("server")
    target, draft = golden_pair(mode.pair, folder)
    if mode.format != "deepspec":
        draft = converted(draft, mode.format, folder / mode.format)
    rewrite(draft, **mode.changes)
    if mode.prefix:
        weights, heads = draft / "model.safetensors", ("markov_head.", "confidence_head.")
        tensors = {f"{mode.prefix}{n}" if n.startswith(heads) else n: t for n, t in load_file(weights).items()}
        save_file(tensors, weights)
    arguments = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(draft), *mode.arguments]
    if mode.trims:
        (folder / "steep.json").write_text(json.dumps({**STEEP, "max_batch_tokens": 64}))
        arguments += ["--speculative-dspark-sps-table-path", str(folder / "steep.json")]
    environment = {"SGLANG_RAGGED_VERIFY_MODE": mode.verify}
    with Server(target, arguments, folder, environment) as server:
        yield mode, server


def test_the_log_says_what_is_active(served: tuple[Mode, Server]) -> None:
    lines = [line for line in served[1].log.splitlines() if "DSPARK: sglang-dspark" in line]
    assert len(lines) == 1
    assert "checkpoints" in lines[0] and "cpu" in lines[0] and "block" in lines[0]


def test_greedy_answers_are_those_of_plain_decoding(served: tuple[Mode, Server]) -> None:
    mode, server = served
    for run in runs(mode.pair):
        for _ in range(2):  # the second time its prompt is cached
            answer = server.generate(run["prompt"], max_new_tokens=run["max_new_tokens"])
            assert answer["output_ids"] == run["output"]


def test_batched_answers_are_too(served: tuple[Mode, Server]) -> None:
    mode, server = served
    golden = [r for r in runs(mode.pair) for _ in range(3)]
    tokens = min(r["max_new_tokens"] for r in golden)
    answers = server.together([r["prompt"] for r in golden], max_new_tokens=tokens)
    assert answers == [r["output"][:tokens] for r in golden]


def test_long_answers_are_those_of_transformers(served: tuple[Mode, Server]) -> None:
    """Long enough for windows to pass, and often enough for cache rows to be used again in another order."""
    mode, server = served
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / mode.pair / "target", dtype=torch.float32)
    prompts = [run["prompt"] for run in runs(mode.pair)]
    wanted = []
    for prompt in prompts:
        settings = {"do_sample": False, "min_new_tokens": 160, "max_new_tokens": 160, "eos_token_id": None}
        with torch.no_grad():
            tokens = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
        wanted.append(tokens[0, len(prompt) :].tolist())
    for _ in range(2):
        assert server.together(prompts * 2, max_new_tokens=160) == wanted * 2


def test_streamed_answers_are_too(served: tuple[Mode, Server]) -> None:
    mode, server = served
    run = runs(mode.pair)[0]
    assert stream(server, run["prompt"], run["max_new_tokens"]) == run["output"]


def test_as_many_drafts_are_accepted_as_by_the_local_engine(served: tuple[Mode, Server]) -> None:
    """The same rounds and accepted drafts for each prompt, so the same drafts; fewer where budgets are cut."""
    mode, server = served
    if mode.changes:
        pytest.skip("The draft was not trained like this.")
    folder = GOLDEN / mode.pair
    engine = load_engine(folder / "target", folder / "draft", dtype="float32", device="cpu", threads=1, compile=False)
    for run in runs(mode.pair):
        meta = server.generate(run["prompt"], max_new_tokens=run["max_new_tokens"])["meta_info"]
        request = Request(tuple(run["prompt"]), run["max_new_tokens"], SamplingParams(), schedule=Fixed())
        rounds = [r for r in engine.generate(request) if r.drafted]
        wanted, got = len(rounds), meta["spec_verify_ct"]
        accepted, mine = sum(r.accepted for r in rounds), meta["spec_num_correct_drafts"]
        assert (got >= wanted and mine <= accepted) if mode.trims else (got, mine) == (wanted, accepted)


def test_budgets_are_cut_where_steps_cost(served: tuple[Mode, Server]) -> None:
    """By the mean number of rows verified a round, the anchor's included, which SGLang gives where it schedules."""
    mode, server = served
    golden = runs(mode.pair)
    metas = [server.generate(r["prompt"], max_new_tokens=r["max_new_tokens"])["meta_info"] for r in golden]
    block = len(golden[0]["rounds"][0]["drafted_full"])
    rows = [meta["spec_cap_length"] for meta in metas if meta.get("spec_cap_length") is not None]
    assert len(rows) == (len(golden) if mode.trims else 0)
    assert all(1 <= n < block + 1 for n in rows)


def test_sampling_takes_only_what_it_may(served: tuple[Mode, Server]) -> None:
    mode, server = served
    run = runs(mode.pair)[0]
    greedy = server.generate(run["prompt"], temperature=1.0, top_k=1, max_new_tokens=16)["output_ids"]
    assert greedy == run["output"][:16]
    sampled = server.together([run["prompt"]] * 8, temperature=1.5, max_new_tokens=16)
    assert len({tuple(tokens) for tokens in sampled}) > 1


def joint(target: Path, prompt: list[int], tokens: int, temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    """The target's exact distribution of sampled tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for chosen, p in chances.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *chosen]])).logits[0, -1] / temperature
            values, ids = logits.topk(top_k)
            longer |= {(*chosen, i): p * q for i, q in zip(ids.tolist(), values.softmax(0).tolist(), strict=True)}
        chances = longer
    return chances


def test_sampled_tokens_have_the_targets_distribution(served: tuple[Mode, Server]) -> None:
    """χ² over the three tokens after a prompt, of which two are of one round; rare ones pooled. The bound, by Wilson
    and Hilferty's approximation, is exceeded once in 10⁴ runs.
    """
    mode, server = served
    if mode != MODES["static"]:
        pytest.skip("One mode is enough: all sample with the same functions.")
    prompt, count = runs(mode.pair)[1]["prompt"], 1000
    exact = joint(server.target, prompt, 3, 3.0, 3)
    seen = Counter(map(tuple, server.together([prompt] * count, 8, temperature=3.0, top_k=3, max_new_tokens=3)))
    assert fits(seen, exact, 12)


def test_bfloat16_answers_are_those_of_the_plain_server(tmp_path: Path) -> None:
    """Against a plain server on the same platform. Where they part, rounding may have decided: answers that agree for
    most of their length are asked for, and most of them whole.
    """
    target, draft = golden_pair("qwen3-vanilla", tmp_path)
    golden = runs("qwen3-vanilla")
    answers = []
    for name, arguments in (
        ("plain", []),
        ("dspark", ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(draft)]),
    ):
        with Server(target, arguments, tmp_path / name, {"SGLANG_PLATFORM": "dspark_cpu"}, "bfloat16") as server:
            answers.append([server.generate(r["prompt"], max_new_tokens=24)["output_ids"] for r in golden])
    same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(*answers, strict=True)]
    assert sum(n == 24 for n in same) >= len(golden) - 1
