"""The whole loop of draft, schedule, verify keeps the target's distribution, and every fault that we know would show.

A toy target (logits by the last two tokens) and a toy draft (logits by row, anchor and token before, confidences
likewise) are tables over six tokens. `Loop` runs rounds for N requests side by side, with the random numbers that a
request of each seed would have; the joint distribution of the first four new tokens is compared with the exact one,
which the reference of conftest.py enumerates, by a χ² test. At N = 24,000 and p < 1e-4 it notices, nine times in ten,
a deviation of Σ (decoded - exact)² / exact = 0.012 when all 1,296 outcomes are possible (`test_power`). The planted
faults are well beyond that (p < 1e-9), and correct decoding passes with these seeds.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare, ncx2

from sglang_dspark.decoding import sampling, verify
from sglang_dspark.decoding.sampling import Purpose, SamplingParams, penalise, probabilities, sample, uniforms
from sglang_dspark.decoding.schedule import (
    Algorithm1,
    CostCurve,
    Fixed,
    Schedule,
    Threshold,
    algorithm1,
    survival,
)

N, V, BLOCK, NEW = 24_000, 6, 3, 4
PROMPT = (1, 4, 1)
START, END = len(PROMPT), len(PROMPT) + NEW
PASSES, REJECTS = 1e-4, 1e-9

_tables = torch.Generator().manual_seed(20)
TARGET = torch.randn(V, V, V, generator=_tables) * 1.3
DRAFT = 0.5 * TARGET.mean(0) + torch.randn(BLOCK, V, V, V, generator=_tables)
CONFIDENCE = torch.sigmoid(torch.randn(BLOCK, V, V, generator=_tables) * 1.5 + 0.5)

PARAMS = {
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=1.2, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "penalties": SamplingParams(
        temperature=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={2: 1.0, 5: -0.7},
    ),
}
PARAMS["all"] = replace(PARAMS["penalties"], top_k=5, top_p=0.9, min_p=0.05)

STAIRS = CostCurve((1, 2, 3, 4), (1.0, 1.6, 1.65, 1.7))
"""Verifying a second row is dear and more are nearly free, so Θ may fall and then rise above where it was."""
SCHEDULES: dict[str, Schedule] = {
    "fixed": Fixed(),
    "fixed:2": Fixed(2),
    "threshold": Threshold(0.55),
    "algorithm1": Algorithm1(CostCurve((1, 2, 3, 4), (1.0, 1.3, 1.65, 2.1))),
    "algorithm1 on stairs": Algorithm1(STAIRS),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only lose by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def random_numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For seeds 0..N-1: draft [N, anchor, position], accept [N, position], target [N, position]."""
    anchors, last = range(START - 1, END - 1), END + BLOCK
    draft = torch.zeros(N, END, last, dtype=torch.float64)
    accept, target = torch.zeros(N, last, dtype=torch.float64), torch.zeros(N, last, dtype=torch.float64)
    for seed in range(N):
        for a in anchors:
            draft[seed, a, a + 1 : a + 1 + BLOCK] = uniforms(seed, Purpose.DRAFT, a + 1, BLOCK, anchor=a)
        accept[seed, START:] = uniforms(seed, Purpose.ACCEPT, START, last - START)
        target[seed, START:] = uniforms(seed, Purpose.TARGET, START, last - START)
    return draft, accept, target


def each_alone(schedule: Schedule, confidence: torch.Tensor) -> torch.Tensor:
    """Lengths [R] from confidences [R, BLOCK], one request at a time."""
    rows = [tuple(c) for c in confidence.tolist()]
    length = {c: schedule.length(c, BLOCK) for c in set(rows)}
    return torch.tensor([length[c] for c in rows])


@dataclass(frozen=True)
class Loop:
    """The decoding loop; a test of a fault replaces the part that is to be wrong."""

    params: SamplingParams
    schedule: Schedule
    greedy_drafts: bool = False
    lengths: Callable[[Schedule, torch.Tensor], torch.Tensor] = each_alone
    accept_sampled: Callable[..., tuple[torch.Tensor, torch.Tensor]] = verify.accept_sampled
    count_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = sampling.count_rows
    q_params: SamplingParams | None = None
    one_number_for_draft_and_accept: bool = False
    seen_lengths: set[int] = field(default_factory=set)

    def process(self, logits: torch.Tensor, output_counts: torch.Tensor) -> torch.Tensor:
        prompt_counts = torch.bincount(torch.tensor(PROMPT), minlength=V)
        bias = torch.zeros(V)
        for token, value in dict(self.params.logit_bias).items():
            bias[token] = value
        return penalise(logits, self.params, prompt_counts, output_counts) + bias

    def decode(self) -> torch.Tensor:
        """NEW tokens of each request, [N, NEW]."""
        tokens = torch.zeros(N, END + BLOCK + 1, dtype=torch.long)
        tokens[:, :START] = torch.tensor(PROMPT)
        length = torch.full((N,), START)
        while (active := (length < END).nonzero().squeeze(-1)).numel():
            accepted, block = self.round(tokens[active], length[active], active)
            tokens[active.unsqueeze(-1), length[active].unsqueeze(-1) + torch.arange(BLOCK + 1)] = block
            length[active] += accepted + 1
        return tokens[:, START:END]

    def round(
        self, tokens: torch.Tensor, length: torch.Tensor, seeds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One round of requests with `length` [R] committed `tokens`: how many drafts were accepted, and the block."""
        r, seeds_k = torch.arange(len(tokens)), seeds.unsqueeze(-1)
        position = length.unsqueeze(-1) + torch.arange(BLOCK + 1)
        u_draft, u_accept, u_target = random_numbers()
        u_draft, u_accept = (
            u_draft[seeds_k, length.unsqueeze(-1) - 1, position[:, :-1]],
            u_accept[seeds_k, position[:, :-1]],
        )
        if self.one_number_for_draft_and_accept:
            u_accept = u_draft

        is_output = (torch.arange(tokens.shape[1]) >= START) & (torch.arange(tokens.shape[1]) < length.unsqueeze(-1))
        counts = torch.zeros(len(tokens), V).scatter_add_(-1, tokens, is_output.float())

        before, anchor = tokens[r, length - 2], tokens[r, length - 1]
        drafted, q, confidence = torch.empty(len(r), 0, dtype=torch.long), [], []
        for k in range(BLOCK):
            previous = drafted[:, -1] if k else anchor
            confidence.append(CONFIDENCE[k, anchor, previous])
            logits = self.process(DRAFT[k, anchor, previous], self.count_rows(counts, drafted)[:, -1])
            q.append(probabilities(logits, self.q_params or self.params))
            drawn = sample(probabilities(logits, self.params), u_draft[:, k])
            choice = logits.argmax(-1) if self.greedy_drafts else drawn
            drafted = torch.cat([drafted, choice.unsqueeze(-1)], -1)

        scheduled = self.lengths(self.schedule, torch.stack(confidence, -1))
        self.seen_lengths.update(scheduled.tolist())
        context = torch.cat([before.unsqueeze(-1), anchor.unsqueeze(-1), drafted], -1)
        rows = self.process(TARGET[context[:, :-1], context[:, 1:]], self.count_rows(counts, drafted))
        p = probabilities(rows, self.params)
        if self.greedy_drafts:
            accepted, following = verify.accept_point_mass(p, drafted, scheduled, u_target[seeds_k, position])
        else:
            accepted, following = self.accept_sampled(
                p, torch.stack(q, 1), drafted, scheduled, u_accept, u_target[seeds_k, position]
            )
        block = torch.cat([drafted, following.unsqueeze(-1)], -1)
        block[r, accepted] = following
        return accepted, block


@lru_cache
def plain(params: SamplingParams) -> torch.Tensor:
    """Plain sampling with the same seeds: a block of which nothing is verified commits one token of the target."""
    return Loop(params, Fixed(0), greedy_drafts=True).decode()


@pytest.fixture(scope="session")
def fit(naive: Any) -> Callable[[Loop], float]:
    """The p-value of what a loop decodes under the exact joint distribution."""

    @lru_cache
    def exact(params: SamplingParams) -> np.ndarray:
        joint = np.ones((V,) * NEW)
        for n in range(NEW):
            for output in itertools.product(range(V), repeat=n):
                before, last = (*PROMPT, *output)[-2:]
                _, probs = naive(TARGET[before, last].numpy(), params, PROMPT, output)
                joint[output] *= probs.reshape(-1, *(1,) * (NEW - n - 1))
        assert joint.sum() == pytest.approx(1)
        return joint.ravel()

    def p_value(loop: Loop) -> float:
        cells = loop.decode() @ torch.tensor([V**i for i in reversed(range(NEW))])
        observed, expected = np.bincount(cells, minlength=V**NEW), N * exact(loop.params)
        if observed[expected == 0].any():
            return 0.0
        rare = expected < 5
        pooled = [np.append(x[~rare], x[rare].sum()) for x in (observed, expected)]
        keep = pooled[1] > 0
        return float(chisquare(pooled[0][keep], pooled[1][keep]).pvalue)

    return p_value


COVER = [
    *((params, schedule, False) for params in PARAMS for schedule in ("threshold", "algorithm1")),
    *((params, schedule, False) for params in ("temperature", "all") for schedule in ("fixed", "fixed:2")),
    *((params, "algorithm1", True) for params in PARAMS),
]


@pytest.mark.parametrize(("params", "schedule", "greedy_drafts"), COVER)
def test_decoding_keeps_the_distribution(
    fit: Callable[[Loop], float], params: str, schedule: str, greedy_drafts: bool
) -> None:
    loop = Loop(PARAMS[params], SCHEDULES[schedule], greedy_drafts)
    assert fit(loop) > PASSES
    assert len(loop.seen_lengths) == 1 if "fixed" in schedule else len(loop.seen_lengths) > 1


def mutant(function: Callable[..., Any], right: str, wrong: str, **names: Any) -> Callable[..., Any]:
    """`function` with one piece of its source replaced."""
    source = inspect.getsource(function)
    assert source.count(right) == 1, f"'{right}' is not in {function.__name__} once: plant this fault anew"
    scope = function.__globals__ | names
    exec("from __future__ import annotations\n" + source.replace(right, wrong), scope)
    planted: Callable[..., Any] = scope[function.__name__]
    return planted


unscaled = mutant(sampling.sample, "u.unsqueeze(-1) * total", "u.unsqueeze(-1)")
ACCEPTANCE_FAULTS = {
    "p/q inverted": mutant(verify.accept_sampled, "beside(u_accept, p) * q_x < p_x", "beside(u_accept, p) * p_x < q_x"),
    "everything accepted": mutant(verify.accept_sampled, "beside(u_accept, p) * q_x < p_x", "q_x > 0"),
    "q not subtracted from the residual": mutant(verify.accept_sampled, "(target - draft * rejected)", "target"),
    "residual not renormalised": mutant(verify.accept_sampled, "sample(weights", "unscaled(weights", unscaled=unscaled),
    "bonus from the residual": mutant(verify.accept_sampled, "draft * rejected", "draft"),
    "bonus from q": mutant(verify.accept_sampled, "sample(weights", "sample(torch.where(rejected, weights, draft)"),
}


@pytest.mark.parametrize("fault", ACCEPTANCE_FAULTS)
def test_faults_of_acceptance_show(fit: Callable[[Loop], float], fault: str) -> None:
    loop = Loop(PARAMS["temperature"], Fixed(2), accept_sampled=ACCEPTANCE_FAULTS[fault])
    assert fit(loop) < REJECTS


def forgets_drafts(counts: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    return counts.unsqueeze(-2).expand(-1, drafted.shape[1] + 1, -1)


def peeks(schedule: Schedule, confidence: torch.Tensor) -> torch.Tensor:
    """Token k is admitted by the confidence of token k+1, which has seen token k."""
    return each_alone(schedule, torch.cat([confidence[:, 1:], torch.ones(len(confidence), 1)], -1))


OTHER_FAULTS = {
    "q taken before top-p": {"params": "top_p", "q_params": replace(PARAMS["top_p"], top_p=1.0)},
    "q taken before top-k": {"params": "top_k", "q_params": replace(PARAMS["top_k"], top_k=0)},
    "q taken before min-p": {"params": "min_p", "q_params": replace(PARAMS["min_p"], min_p=0.0)},
    "q at another temperature": {"params": "temperature", "q_params": SamplingParams(temperature=1.6)},
    "penalties forget drafts, sampled": {"params": "penalties", "count_rows": forgets_drafts},
    "penalties forget drafts, greedy": {"params": "penalties", "count_rows": forgets_drafts, "greedy_drafts": True},
    "a budget that peeks": {"params": "temperature", "lengths": peeks, "schedule": Threshold(0.55)},
    "one number drafts and accepts": {"params": "temperature", "one_number_for_draft_and_accept": True},
}


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_faults_of_the_loop_show(fit: Callable[[Loop], float], fault: str) -> None:
    parts: dict[str, Any] = OTHER_FAULTS[fault]
    loop = Loop(**{"schedule": Fixed()} | parts | {"params": PARAMS[parts["params"]]})
    assert fit(loop) < REJECTS


@dataclass(frozen=True)
class BestOfBlock:
    """Algorithm 1 without its early stop: the length at which Θ is greatest over the whole block."""

    curve: CostCurve
    uses_confidence = True

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        tau = list(itertools.accumulate([1.0, *survival(confidence)]))
        return max(range(drafted + 1), key=lambda n: tau[n] * self.curve.steps_per_second(1 + n))


def test_without_the_early_stop_selection_is_biased(fit: Callable[[Loop], float]) -> None:
    """The mechanism, which the paper's Appendix A describes.

    On STAIRS one draft may not pay while two or three do. The best length of the whole block then jumps from 0 over 1
    to 2 or 3, and what makes it jump is a_2 = c_1·c_2, where c_2 has seen token 1. So token 1 is verified just when it
    is one that is followed by confidence. When it is, it is accepted at the usual rate, or corrected; when it is not,
    the target draws the position afresh, and may draw a token that is followed by confidence. Those tokens thus get two
    chances, and come out too often: given that it is verified, token 1 is no longer distributed as q, and the rule
    min(1, p/q) with its residual is right only for a draft from q.

    With the early stop token 1 is admitted or not by c_1, which has seen the anchor alone, and so on along the block.
    It gives up some blocks that would pay, and no curve can make it biased. Drafts that are point masses are immune to
    either rule: there the target draws every token, and the schedule decides only how many of its draws one pass makes.
    """
    biased = Loop(PARAMS["temperature"], BestOfBlock(STAIRS))
    assert fit(biased) < REJECTS
    assert biased.seen_lengths >= {0, 2} and 1 not in biased.seen_lengths
    stopped = Loop(PARAMS["temperature"], Algorithm1(STAIRS))
    assert fit(stopped) > PASSES
    assert len(stopped.seen_lengths) > 1
    assert fit(Loop(PARAMS["temperature"], BestOfBlock(STAIRS), greedy_drafts=True)) > PASSES


def in_pairs(schedule: Schedule, confidence: torch.Tensor) -> torch.Tensor:
    """Two requests at a time share a budget (of an odd number, the last is alone)."""
    assert isinstance(schedule, Algorithm1) and schedule.curve
    survivals = [survival(c) for c in confidence.tolist()]
    pairs = (algorithm1(survivals[i : i + 2], schedule.curve.steps_per_second) for i in range(0, len(survivals), 2))
    return torch.tensor([length for pair in pairs for length in pair])


def test_requests_that_share_a_budget_keep_the_distribution(fit: Callable[[Loop], float]) -> None:
    curve = CostCurve((2, 4, 6, 8), (1.0, 1.3, 1.65, 2.1))
    loop = Loop(PARAMS["temperature"], Algorithm1(curve), lengths=in_pairs)
    assert fit(loop) > PASSES
    assert loop.seen_lengths == {0, 1, 2, 3}


@pytest.mark.parametrize("lengths", [each_alone, peeks])
@pytest.mark.parametrize("schedule", ["fixed", "threshold", "algorithm1"])
@pytest.mark.parametrize("params", ["temperature", "all"])
def test_greedy_drafts_give_the_stream_of_plain_sampling(params: str, schedule: str, lengths: Any) -> None:
    """Token for token with the same seeds, whatever is scheduled, even by a rule that peeks."""
    loop = Loop(PARAMS[params], SCHEDULES[schedule], greedy_drafts=True, lengths=lengths)
    assert torch.equal(loop.decode(), plain(PARAMS[params]))


def test_power() -> None:
    df = V**NEW - 1
    assert ncx2.sf(chi2.isf(PASSES, df), df, 0.012 * N) > 0.9
