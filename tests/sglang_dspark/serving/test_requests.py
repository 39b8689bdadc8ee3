"""Every parameter of a request gives the plain server's answer, or is refused by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving_kit import Server, fits, golden_pair, with_tokenizer
from transformers import AutoModelForCausalLM

from sglang_dspark.serving.choice import restrict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("sglang")]

PAIR, VOCABULARY = "qwen3-vanilla", 192
STEEP = {"sample_batch_tokens": [1, 4, 8, 48], "sample_steps_per_sec": [1000.0, 400.0, 150.0, 10.0]}
PROMPTS = [[(11 * i + (5 + i % 7) * j * j + j) % 190 for j in range(6 + i % 5)] for i in (2, 4, 6, 9, 16, 18, 21)]
GREEDY: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.3},
    "frequency below zero": {"frequency_penalty": -2.0},
    "presence below zero": {"presence_penalty": -2.0},
    "repetition": {"repetition_penalty": 2.0},
    "repetition below one": {"repetition_penalty": 0.6},
    "frequency, presence and a bias": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.6,
        "logit_bias": {"40": 2.5, "41": -50},
    },
    "bias": {"logit_bias": {str(t): 3.0 for t in range(60, 70)}},
    "minimum": {"min_new_tokens": 21, "stop_token_ids": list(range(0, 190, 2)), "ignore_eos": False},
    "minimum and a penalty": {
        "min_new_tokens": 13,
        "stop_token_ids": list(range(0, 190, 3)),
        "presence_penalty": 0.8,
        "ignore_eos": False,
    },
    "stops": {"stop_token_ids": list(range(0, 190, 5)), "ignore_eos": False},
    "stop strings": {"stop": ["a", "5", "("], "ignore_eos": False},
    "a grammar": {"regex": "[a-f]{3}[0-9]{9}[g-z]{20}", "ignore_eos": False},
    "a grammar and a penalty": {"regex": "[a-z]{60}", "frequency_penalty": 1.1, "ignore_eos": False},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = golden_pair(PAIR, tmp_path_factory.mktemp("pair"))
    return with_tokenizer(target, VOCABULARY), draft


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # With overlap scheduling SGLang counts tokens for penalties one step late, and the last one of the prompt.
    arguments = ["--grammar-backend", "xgrammar", "--disable-overlap-schedule"]
    with Server(pair[0], arguments, tmp_path_factory.mktemp("plain"), {"SGLANG_PLATFORM": "dspark_cpu"}) as server:
        yield server


@pytest.fixture(scope="module", params=["static", "compact"])
def dspark(
    request: pytest.FixtureRequest, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("dspark")
    arguments = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(pair[1])]
    arguments += ["--grammar-backend", "xgrammar", "--enable-custom-logit-processor"]
    if request.param != "static":
        (folder / "steep.json").write_text(json.dumps({**STEEP, "max_batch_tokens": 64}))
        arguments += ["--speculative-dspark-sps-table-path", str(folder / "steep.json")]
    with Server(pair[0], arguments, folder, {"SGLANG_RAGGED_VERIFY_MODE": request.param}) as server:
        yield server


@pytest.mark.parametrize("sampling", GREEDY.values(), ids=list(GREEDY))
def test_greedy_answers_are_those_of_the_plain_server(sampling: dict[str, Any], plain: Server, dspark: Server) -> None:
    settings = {"max_new_tokens": 40, **sampling}
    wanted = plain.together(PROMPTS, **settings)
    assert wanted != dspark.together(PROMPTS, max_new_tokens=40)
    assert dspark.together(PROMPTS, **settings) == wanted
    assert [dspark.generate(p, **settings)["output_ids"] for p in PROMPTS[:2]] == wanted[:2]


def test_requests_of_a_batch_do_not_touch_each_other(plain: Server, dspark: Server) -> None:
    from concurrent.futures import ThreadPoolExecutor

    asked = [(p, s) for p, s in product(PROMPTS[:3], [{}, *list(GREEDY.values())[:7]])]
    with ThreadPoolExecutor(len(asked)) as pool:
        wanted, got = (
            list(pool.map(lambda a, s=s: s.generate(a[0], **{"max_new_tokens": 40, **a[1]})["output_ids"], asked))  # type: ignore[misc]
            for s in (plain, dspark)
        )
    assert got == wanted


def test_log_probabilities_are_those_of_the_plain_server(plain: Server, dspark: Server) -> None:
    more = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    for prompt, sampling in zip(PROMPTS, [{}, {"frequency_penalty": 0.7}, {"logit_bias": {"3": 2.0}}], strict=False):
        a, b = (s.generate(prompt, more, max_new_tokens=24, **sampling)["meta_info"] for s in (plain, dspark))
        for key in ("output_token_logprobs", "input_token_logprobs"):
            assert [t[1] for t in a[key]] == [t[1] for t in b[key]]
            assert [t[0] for t in a[key] if t[0] is not None] == pytest.approx(
                [t[0] for t in b[key] if t[0] is not None], abs=2e-4
            )
        assert [[t[1] for t in top] for top in a["output_top_logprobs"]] == [
            [t[1] for t in top] for top in b["output_top_logprobs"]
        ]


def test_several_answers(plain: Server, dspark: Server) -> None:
    for sampling in ({}, {"presence_penalty": 1.1}):
        a, b = (s.generate(PROMPTS[0], n=3, max_new_tokens=20, **sampling) for s in (plain, dspark))
        assert [x["output_ids"] for x in a] == [x["output_ids"] for x in b]


def test_seeds_give_the_same_answer_again(dspark: Server) -> None:
    """Alone and among others, cached or not, whatever else is asked for."""
    for more in ({}, {"top_p": 0.9, "top_k": 40}, {"min_p": 0.05, "frequency_penalty": 0.3}):
        settings = {"temperature": 1.3, "max_new_tokens": 32, **more}
        alone = [dspark.generate(p, **settings, sampling_seed=5)["output_ids"] for p in PROMPTS[:3]]
        assert dspark.together(PROMPTS, **settings, sampling_seed=5)[:3] == alone
        assert dspark.together(PROMPTS[:3], **settings, sampling_seed=6) != alone
        unseeded = dspark.together([PROMPTS[0]] * 6, **settings)
        assert len({tuple(t) for t in unseeded}) > 1


LIMITS: dict[str, dict[str, Any]] = {
    "min-p": {"temperature": 5.0, "min_p": 0.4},
    "all limits": {"temperature": 3.0, "min_p": 0.1, "top_k": 5, "top_p": 0.8},
    "min-p and a penalty": {"temperature": 5.0, "min_p": 0.4, "frequency_penalty": 1.5},
}


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("sampling", LIMITS.values(), ids=list(LIMITS))
def test_sampled_tokens_have_the_targets_distribution(
    sampling: dict[str, Any], seeded: bool, pair: tuple[Path, Path], dspark: Server
) -> None:
    """χ² over the three tokens after a prompt, rare ones pooled. The bound is exceeded once in 10⁴ runs."""
    if seeded and sampling is not LIMITS["all limits"]:
        pytest.skip("One setting is enough: all sample with the same function.")
    from concurrent.futures import ThreadPoolExecutor

    prompt, count = PROMPTS[1], 600
    exact = joint(pair[0], prompt, 3, sampling)
    with ThreadPoolExecutor(8) as pool:
        given = [{"sampling_seed": 1000 + i} if seeded else {} for i in range(count)]
        answers = pool.map(lambda s: dspark.generate(prompt, max_new_tokens=3, **sampling, **s)["output_ids"], given)
    seen = Counter(map(tuple, answers))
    assert fits(seen, exact, 5)


def joint(target: Path, prompt: list[int], tokens: int, sampling: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The target's exact distribution of sampled tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    limits = [torch.tensor([sampling.get(n, d)]) for n, d in (("top_k", VOCABULARY), ("top_p", 1.0), ("min_p", 0.0))]
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer: dict[tuple[int, ...], float] = {}
        for chosen, p in chances.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *chosen]])).logits[0, -1]
            for token in chosen:
                logits[token] -= sampling.get("frequency_penalty", 0.0)
            q = restrict(logits[None] / sampling["temperature"], *limits)[0].softmax(0)
            longer |= {(*chosen, int(i)): p * float(q[i]) for i in q.nonzero().flatten()}
        chances = longer
    return chances


@pytest.mark.parametrize(
    "name, more, sampling",
    [
        ("custom_logit_processor", {"custom_logit_processor": "anything"}, {}),
        ("return_hidden_states", {"return_hidden_states": True}, {}),
        ("custom_params.dspark", {}, {"custom_params": {"dspark": False}}),
        ("eam search", {}, {"beam_width": 2}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    name: str, more: dict[str, Any], sampling: dict[str, Any], dspark: Server
) -> None:
    reply = dspark.ask(PROMPTS[0], more, max_new_tokens=4, **sampling)
    assert reply.status_code == 400
    assert name in reply.text
    assert dspark.ask(PROMPTS[0], max_new_tokens=4).status_code == 200


def test_the_openai_api_refuses_and_honours_too(plain: Server, dspark: Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "temperature": 0}
    for more in ({"frequency_penalty": 1.2}, {"presence_penalty": 0.9, "logit_bias": {"70": 4}}, {"min_tokens": 9}):
        a, b = (httpx.post(f"{s.url}/v1/chat/completions", json=body | more, timeout=300) for s in (plain, dspark))
        assert a.status_code == 200
        assert a.json()["choices"][0]["message"] == b.json()["choices"][0]["message"]
    refused = httpx.post(
        f"{dspark.url}/v1/chat/completions", json=body | {"custom_params": {"dspark": False}}, timeout=300
    )
    assert refused.status_code == 400 and "custom_params.dspark" in refused.text
