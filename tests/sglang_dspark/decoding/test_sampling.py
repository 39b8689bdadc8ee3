"""The target distribution against the definitions, and the random numbers against what they promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from sglang_dspark.decoding import sampling
from sglang_dspark.decoding.sampling import History, Purpose, SamplingParams, probabilities, sample, uniforms
from sglang_dspark.errors import InputError

V = 12
# Penalties and biases are exact in binary, so equal logits are equal in float32 and in float64. No sum of few
# probabilities of such logits comes within rounding of these top_p and min_p.
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.31, 1.0, 1.7]),
    top_k=st.integers(0, V + 2),
    top_p=st.sampled_from([0.013171, 0.371317, 0.623417, 0.951373, 1.0]),
    min_p=st.sampled_from([0.0, 0.0513171, 0.413717, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.25]),
    frequency_penalty=st.sampled_from([0.0, -0.25, 0.75]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.25, 2.0]), max_size=3),
)
TOKENS = st.lists(st.integers(0, V - 1), max_size=8)


def rows(count: int) -> st.SearchStrategy[list[list[float]]]:
    """Logits with many ties and both signs."""
    return st.lists(st.lists(st.integers(-3, 3).map(float), min_size=V, max_size=V), min_size=count, max_size=count)


@settings(max_examples=300, deadline=None)
@given(PARAMS, TOKENS, TOKENS, st.lists(st.integers(0, V - 1), min_size=3, max_size=3), rows(4))
def test_rows_of_a_verification_follow_the_definitions(
    naive: Any,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    drafted: list[int],
    logits: list[list[float]],
) -> None:
    history = History(params, prompt, V)
    history.extend(output[:2])
    history.extend(output[2:])
    given_logits = torch.tensor(logits)
    processed = history.process(given_logits, drafted)
    probs = probabilities(processed, params)
    assert given_logits.tolist() == logits, "the model's logits are not written to"
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))
    for i, row in enumerate(logits):
        want_logits, want_probs = naive(np.array(row), params, prompt, output + drafted[:i])
        np.testing.assert_allclose(processed[i], want_logits, atol=1e-5)
        if not params.greedy:  # in a tie after float rounding either argmax is right
            # Rarer tokens may underflow in float32.
            assert ((probs[i] > 1e-30).numpy() == (want_probs > 1e-30)).all()
            np.testing.assert_allclose(probs[i], want_probs, atol=1e-6)
        # A draft step sees the same history with one row.
        assert torch.equal(history.process(given_logits[i : i + 1], drafted[:i])[0], processed[i])


@pytest.mark.parametrize(("spread", "fewest", "most"), [(4.5, 2, 256), (2.9, 257, 4096), (0.5, 4097, 49152)])
def test_top_p_keeps_the_smallest_set_at_every_width_of_its_search(
    naive: Any, spread: float, fewest: int, most: int
) -> None:
    logits = torch.randn(3, 49152, generator=torch.Generator().manual_seed(7)) * spread
    params = SamplingParams(temperature=1.0, top_p=0.9)
    probs = probabilities(logits, params)
    for i in range(3):
        _, want = naive(logits[i].numpy(), params, (), ())
        kept = int((want > 0).sum())
        assert fewest <= kept <= most, "the case does not reach the width it is for"
        assert torch.equal(probs[i] > 0, torch.from_numpy(want > 0))
        # Smallest: tokens differ in probability here, and without its least token the set falls short.
        full = logits[i].double().softmax(-1)[torch.from_numpy(want > 0)]
        assert full.sum() >= 0.9 > full.sum() - full.min()


def test_a_flat_row_does_not_change_its_neighbours() -> None:
    """Bit for bit: the engine verifies rows together or alone, and the same seed must give the same tokens."""
    logits = torch.randn(4, 9000, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[8.0], [0.1], [3.0], [1.0]]
    )
    for params in (
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
        SamplingParams(temperature=0.8, top_p=0.95, min_p=0.01),
    ):
        together = probabilities(logits, params)
        assert all(torch.equal(together[i], probabilities(logits[i], params)) for i in range(4))


def test_greedy_is_the_argmax_after_penalties() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    plain, penalised = SamplingParams(), SamplingParams(presence_penalty=0.5)
    assert plain.plain_greedy and penalised.greedy and not penalised.plain_greedy
    assert History(plain, [0], 3).process(logits) is logits
    history = History(penalised, [0], 3)
    assert history.process(logits).argmax(-1).item() == 0, "presence counts the output only"
    history.extend([0])
    assert history.process(logits).argmax(-1).item() == 1
    assert probabilities(history.process(logits), penalised).tolist() == [[0.0, 1.0, 0.0]]


def test_tiny_temperatures_are_greedy_and_low_ones_do_not_overflow() -> None:
    logits = torch.tensor([[300.0, 299.0, -300.0]])
    assert SamplingParams(temperature=1e-8).greedy
    for temperature in (1e-8, 1.1e-5):
        assert probabilities(logits, SamplingParams(temperature=temperature)).tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", True),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", {"3": 1.0}),
        ("seed", 1.5),
        ("seed", 2**63),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: object) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(InputError, match=rf"{field}.* must be .*\.$"):
        SamplingParams(**changed)


def test_parameters_are_values() -> None:
    params = SamplingParams(temperature=0.7, logit_bias={5: 1.0, 2: -1.0})
    assert params.logit_bias == ((2, -1.0), (5, 1.0))
    assert hash(params) == hash(dataclasses.replace(params))
    seeded = params.with_seed()
    assert seeded.seed is not None and seeded.with_seed() is seeded
    with pytest.raises(InputError, match="names token 5, but the vocabulary has only 5"):
        History(params, [], 5)


WEIGHTS = st.lists(st.sampled_from([0.0, 1e-30, 1e-9, 0.25, 0.5, 3.0]), min_size=1, max_size=9).filter(any)


@given(WEIGHTS, st.floats(0, 1))
def test_sampling_inverts_the_cumulative_distribution(weights: list[float], u: float) -> None:
    token = int(sample(torch.tensor(weights), torch.tensor(u, dtype=torch.float64)))
    assert weights[token] > 0
    below, upto = sum(weights[:token]), sum(weights[: token + 1])
    assert below / sum(weights) - 1e-7 <= u <= upto / sum(weights) + 1e-7


def test_a_token_holds_its_lower_end_and_not_its_upper() -> None:
    probs = torch.tensor([0.0, 0.25, 0.75]).expand(3, 3)
    assert sample(probs, torch.tensor([0.0, 0.25 - 2**-50, 0.25], dtype=torch.float64)).tolist() == [1, 1, 2]


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_tokens_without_mass_are_never_drawn(u: float) -> None:
    probs = torch.zeros(1, 49152)
    probs[0, 100:200] = 0.01
    assert 100 <= int(sample(probs, torch.tensor([u], dtype=torch.float64))) < 200


def test_nor_where_a_parallel_sum_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.Tensor.cumsum
    jitter = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 1e-3
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, *a, **k: exact(self, *a, **k) + jitter)
    probs = torch.tensor([0.0, 0.25, 0.0, 0.0] * 16) / 4
    tokens = sample(probs.expand(4096, 64), torch.linspace(0, 1, 4096, dtype=torch.float64))
    assert (tokens % 4 == 1).all()


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(Purpose), st.integers(0, 2**40), st.integers(0, 9))
def test_random_numbers_do_not_depend_on_how_rounds_were_cut(
    seed: int, purpose: Purpose, start: int, anchor: int
) -> None:
    together = uniforms(seed, purpose, start, 6, anchor)
    assert ((together >= 0) & (together < 1)).all()
    assert torch.equal(together, torch.cat([uniforms(seed, purpose, start + i, 1, anchor) for i in range(6)]))


def test_random_numbers_are_uniform_and_unrelated_across_keys() -> None:
    n = 4000
    streams = [
        *(uniforms(1, purpose, 0, n) for purpose in Purpose),
        uniforms(2, Purpose.DRAFT, 0, n),
        uniforms(1, Purpose.DRAFT, 0, n, anchor=1),
        uniforms(1, Purpose.DRAFT, 1, n),
        torch.cat([uniforms(seed, Purpose.TARGET, 3, 1) for seed in range(100, 100 + n)]),
    ]
    for stream in streams:
        assert kstest(stream.numpy(), "uniform").pvalue > 1e-3
    correlations = np.corrcoef(torch.stack(streams).numpy()) - np.eye(len(streams))
    assert np.abs(correlations).max() < 4 / np.sqrt(n)


def one_too_many(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """A fault: top-p keeps a token more than it needs."""
    falling = probs.sort(-1, descending=True).values
    return falling.gather(-1, (falling.cumsum(-1) < top_p).sum(-1, keepdim=True) + 1)


def ignore_sign(logits: torch.Tensor, params: SamplingParams, prompt: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A fault: the repetition penalty divides negative logits too."""
    return torch.where(prompt + out > 0, logits / params.repetition_penalty, logits)


def no_drafts(counts: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """A fault: later rows of a verification forget the drafts before them."""
    return counts.expand(len(drafted) + 1, -1)


@pytest.mark.parametrize(
    ("name", "fault", "params"),
    [
        ("_top_p_floor", one_too_many, SamplingParams(temperature=1.0, top_p=0.6)),
        ("penalise", ignore_sign, SamplingParams(temperature=1.0, repetition_penalty=1.5)),
        ("count_rows", no_drafts, SamplingParams(temperature=1.0, frequency_penalty=0.5)),
    ],
)
def test_the_reference_notices_planted_faults(
    monkeypatch: pytest.MonkeyPatch, naive: Any, name: str, fault: Any, params: SamplingParams
) -> None:
    logits = torch.randn(1 + 3, V, generator=torch.Generator().manual_seed(3)) * 2

    def differs(drafted: Sequence[int] = (4, 5, 6)) -> bool:
        probs = probabilities(History(params, range(4), V).process(logits, drafted), params)
        wants = [naive(logits[i].numpy(), params, range(4), drafted[:i])[1] for i in range(4)]
        return not np.allclose(probs, np.stack(wants), atol=1e-6)

    assert not differs()
    monkeypatch.setattr(sampling, name, fault)
    assert differs()
