"""Sampling through `loop.decode` follows the target's exact distribution, and faults of the loop would show.

The target's logits are a table by the last two tokens, so one long answer visits every pair of tokens many times, and
what follows each pair is multinomial with probabilities that can be written down: a χ² test over all pairs. Penalties
make short answers of their own, whose joint distribution is enumerated. `TableDrafter` asserts besides, in each round,
that it observed the features of exactly the committed tokens.
"""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from local_runner.engines import loop
from local_runner.engines.base import Request
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Algorithm1, CostCurve, Fixed, Schedule, Threshold

V, TOKENS = 4, 12_000
PROMPT = (1, 3, 1)
PASSES, REJECTS = 1e-4, 1e-9
PARAMS = {
    "temperature": SamplingParams(temperature=0.9, seed=21),
    "top_p": SamplingParams(temperature=1.0, top_p=0.85, seed=22),
    "min_p, bias": SamplingParams(temperature=1.1, min_p=0.15, logit_bias={1: 0.7}, seed=23),
}
SCHEDULES: dict[str, Schedule] = {
    "fixed": Fixed(),
    "threshold": Threshold(0.5),
    "algorithm1": Algorithm1(CostCurve((1, 2, 3, 4), (1.0, 1.15, 1.3, 1.5))),
}

Tables = Callable[..., tuple[Any, Any]]
Decode = Callable[..., Any]


def p_value(observed: np.ndarray, expected: np.ndarray, groups: int) -> float:
    """Of Pearson's χ², with one degree of freedom fewer for each group whose total is given."""
    if observed[expected == 0].any():
        return 0.0
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    return float(chi2.sf(statistic, kept.sum() - groups))


def long_answer(tables: Tables, naive: Any, wanted: Request, decode: Decode = loop.decode) -> float:
    """The p-value of one answer of TOKENS tokens, given every pair of tokens before each."""
    target, drafter = tables(vocab=V)
    said = [*PROMPT, *(t for r in decode(target, drafter, wanted) for t in r.committed)]
    assert len(said) == len(PROMPT) + TOKENS
    observed = np.zeros((V, V, V))
    for a, b, c in zip(said[1:-2], said[2:-1], said[3:], strict=True):
        observed[a, b, c] += 1
    table = target.table.numpy()
    exact = np.array([[naive(table[a, b], wanted.sampling, (), ())[1] for b in range(V)] for a in range(V)])
    visits = observed.sum(-1, keepdims=True)
    assert (visits > 20).all()
    return p_value(observed, visits * exact, V * V)


def request(params: str, schedule: str, style: str = "sampled") -> Request:
    return Request(PROMPT, TOKENS, PARAMS[params], schedule=SCHEDULES[schedule], draft_style=style)


@pytest.mark.parametrize(
    ("params", "schedule", "style"),
    [
        *(("temperature", schedule, "sampled") for schedule in SCHEDULES),
        ("top_p", "fixed", "sampled"),
        ("min_p, bias", "threshold", "sampled"),
        ("temperature", "algorithm1", "greedy"),
    ],
)
@pytest.mark.slow
def test_sampling_through_the_loop(tables: Tables, naive: Any, params: str, schedule: str, style: str) -> None:
    assert long_answer(tables, naive, request(params, schedule, style)) > PASSES


def planted(*faults: tuple[str, str]) -> Decode:
    """`loop.decode` with pieces of its module's source replaced."""
    source = inspect.getsource(loop)
    for right, wrong in faults:
        assert source.count(right) == 1, f"'{right}' is not in the loop once: plant this fault anew"
        source = source.replace(right, wrong)
    scope: dict[str, Any] = {"__name__": loop.__name__}
    exec(compile(textwrap.dedent(source), "loop with a fault", "exec"), scope)
    decode: Decode = scope["decode"]
    return decode


FAULTS = {
    "q of another row": ("self._q[first : first + k]", "self._q[max(first - 1, 0) :][:k]"),
    "p of another row": ("self.history.process(logits[done :", "self.history.process(logits[max(done - 1, 0) :"),
    "q before the filters": (
        "self._q.append(probabilities(row, self.params))\n                    token = int(sample(self._q[-1]",
        "self._q.append(row.softmax(-1))\n                    token = int(sample(probabilities(row, self.params)",
    ),
    "one number drafts and accepts": (
        "uniforms(self._seed, Purpose.ACCEPT, after, k)",
        "uniforms(self._seed, Purpose.DRAFT, after, k, anchor=position)",
    ),
    "every draft is accepted": ("u_accept, u_next)\n        else", "0 * u_accept, u_next)\n        else"),
    "the schedule sees what it admits": (
        "request.schedule.length(draft.confidence, len(draft.tokens))",
        "sum(t % 2 for t in draft.tokens[:2])",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_faults_of_the_loop_show(tables: Tables, naive: Any, fault: str) -> None:
    wanted = request("top_p" if "filters" in fault else "temperature", "fixed")
    assert long_answer(tables, naive, wanted, planted(FAULTS[fault])) < REJECTS


N, NEW = 3500, 3
PENALISED = SamplingParams(
    temperature=0.8, repetition_penalty=1.6, presence_penalty=0.8, frequency_penalty=1.2, logit_bias={2: 0.6}
)


def short_answers(tables: Tables, naive: Any, decode: Decode = loop.decode) -> float:
    """The p-value of the joint distribution of NEW tokens under penalties, over N seeds."""
    target, drafter = tables(vocab=V)
    table = target.table.numpy()
    exact = np.ones((V,) * NEW)
    for output in itertools.chain.from_iterable(itertools.product(range(V), repeat=n) for n in range(NEW)):
        before = (*PROMPT, *output)
        _, probabilities = naive(table[before[-2], before[-1]], PENALISED, PROMPT, output)
        exact[output] *= probabilities.reshape(-1, *(1,) * (NEW - len(output) - 1))
    observed = np.zeros_like(exact)
    wanted = Request(PROMPT, NEW, PENALISED, schedule=Fixed(), draft_style="sampled")
    for seed in range(N):
        seeded = replace(wanted, sampling=replace(PENALISED, seed=seed))
        observed[tuple(t for r in decode(target, drafter, seeded) for t in r.committed)] += 1
    expected, rare = N * exact.ravel(), N * exact.ravel() < 5
    pooled = [np.append(x[~rare], x[rare].sum()) for x in (observed.ravel(), expected)]
    return p_value(pooled[0], pooled[1], 1)


@pytest.mark.slow
def test_penalties_through_the_loop(tables: Tables, naive: Any) -> None:
    assert short_answers(tables, naive) > PASSES


PENALTY_FAULTS = {
    "the history forgets a round": ("committed, stop = stops.cut((*block[:accepted], token), position)\n        "
                                    "picker.history.extend(committed)",
                                    "committed, stop = stops.cut((*block[:accepted], token), position)"),
    "the first token is forgotten": ("_, anchor = picker.verify(logits, [], position)\n    "
                                     "committed, stop = stops.cut((anchor,), position)\n    "
                                     "picker.history.extend(committed)",
                                     "_, anchor = picker.verify(logits, [], position)\n    "
                                     "committed, stop = stops.cut((anchor,), position)"),
    "drafts are no history": ("self.history.process(logits[done : done + len(window) + 1], "
                              "drafted[: done + len(window)])",
                              "torch.cat([self.history.process(row[None]) for row in logits[done :][:2]])"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PENALTY_FAULTS)
@pytest.mark.slow
def test_faults_of_penalties_show(tables: Tables, naive: Any, fault: str) -> None:
    assert short_answers(tables, naive, planted(PENALTY_FAULTS[fault])) < REJECTS


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("active.observe(accepted + 1)", "active.observe(scheduled + 1)"),
        ("active.observe(accepted + 1)", "active.observe(1)"),
        ("target.truncate(position + 1 + accepted)", "target.truncate(position + accepted)"),
        ("target.truncate(position + 1 + accepted)", "pass"),
    ],
)
def test_wrong_counts_are_noticed_at_once(tables: Tables, right: str, wrong: str) -> None:
    target, drafter = tables(vocab=V)
    list(loop.decode(target, drafter, replace(request("temperature", "fixed"), max_new_tokens=100)))
    with pytest.raises(AssertionError):
        list(planted((right, wrong))(target, drafter, replace(request("temperature", "fixed"), max_new_tokens=100)))
