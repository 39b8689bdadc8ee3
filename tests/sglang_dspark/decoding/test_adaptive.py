"""The policy in simulated time: acceptance rates and costs are known, so the best that could be done is too."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.decoding.adaptive import (
    BOUND,
    LONG,
    Costs,
    Policy,
    Source,
    Survivals,
    admitted,
    expected,
)
from sglang_dspark.decoding.schedule import CostCurve, algorithm1, survival
from sglang_dspark.errors import InputError

Rates = Callable[[int], Sequence[float]]
BLOCK = 7
FLAT = Costs(1.0, 1.002, CostCurve(tuple(range(1, 9)), (1.0, 1.08, 1.13, 1.18, 1.22, 1.27, 1.31, 1.35), 0.54))
STEEP = Costs(1.0, 1.004, CostCurve((1, 2, 4, 6, 8), (1.0, 1.71, 2.57, 3.71, 4.30), 1.3))
STEPPED = Costs(1.0, 1.001, CostCurve((1, 2, 8), (1.0, 1.62, 1.62), 0.4))


def simulate(
    policy: Policy,
    tokens: int,
    head: Rates,
    lookup: Rates = lambda n: (),
    confident: Callable[[float], float] | None = None,
    seed: int = 1,
) -> tuple[float, list[tuple[Source, int]]]:
    """Seconds of an answer of so many tokens, and the source and length of each of its rounds.

    After n tokens the drafts of a head survive with the chances head(n), given those before; look-up's with lookup(n).
    """
    numbers, made, seconds = random.Random(seed), 0, 0.0
    rounds: list[tuple[Source, int]] = []
    policy.begin()
    while made < tokens:
        chances, found = head(made), lookup(made)
        matches = range(4, 4 + len(found))
        source = policy.choose(matches)
        survives = chances if source == "head" else found if source == "lookup" else ()
        confidence = [confident(c) for c in survives] if confident else ()
        scheduled = policy.length(confidence, len(survives)) if survives else 0
        accepted = sum(itertools.takewhile(bool, (numbers.random() < c for c in survives[:scheduled])))
        following = policy.following
        policy.observe(scheduled, accepted)
        if found:
            looked_up = source == "lookup"
            right = accepted if looked_up else int(numbers.random() < found[0])
            policy.compared(matches[: scheduled if looked_up else 1], right)
        seconds += policy.costs.round_s(source, scheduled, following)
        made += accepted + 1
        rounds.append((source, scheduled))
    return seconds, rounds


def best_fixed(costs: Costs, chances: Sequence[float]) -> tuple[float, int]:
    """Tokens per second of the best fixed length, by trying all, and that length; 0 is plain decoding."""
    rates = [1 / costs.plain_s]
    for k in range(1, len(chances) + 1):
        a = survival(chances)[:k]
        rates.append((1 + sum(a)) / costs.round_s("head", k, True))
    return max((rate, k) for k, rate in enumerate(rates))


def policy(costs: Costs = FLAT, *, head: bool = True) -> Policy:
    return Policy(costs, BLOCK, head=head, longest=4)


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEPPED], ids=["flat", "steep", "stepped"])
@pytest.mark.parametrize("chance", [0.2, 0.6, 0.75, 0.9, 0.97])
@pytest.mark.parametrize("fading", [1.0, 0.8])
def test_it_converges_to_the_best_fixed_length(costs: Costs, chance: float, fading: float) -> None:
    chances = [chance * fading**k for k in range(BLOCK)]
    rate, length = best_fixed(costs, chances)
    seconds, rounds = simulate(policy(costs), 20_000, lambda n: chances)
    assert 20_000 / seconds > 0.96 * rate
    late = rounds[len(rounds) // 2 :]
    near = sum(abs(k - length) <= 1 for _, k in late) / len(late)
    exact = best_fixed(costs, chances)[0]
    # Lengths whose rates are within a percent of each other cannot be told apart, and need not be.
    alike = [
        k
        for k in range(BLOCK + 1)
        if (1 + sum(survival(chances)[:k])) / (costs.round_s("head", k, True) if k else costs.plain_s) > 0.98 * exact
    ]
    assert near > 0.9 or sum(k in alike for _, k in late) / len(late) > 0.85


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEPPED], ids=["flat", "steep", "stepped"])
@pytest.mark.parametrize("confidence", [None, 0.95])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3])
def test_a_head_that_does_not_help_costs_at_most_the_bound(
    costs: Costs, confidence: float | None, chance: float
) -> None:
    sure = None if confidence is None else (lambda c: confidence)
    chances = [chance] * BLOCK
    assert best_fixed(costs, chances)[1] == 0
    for tokens in (LONG, 10_000):
        for seed in range(5):
            tried = policy(costs)
            seconds, _ = simulate(tried, tokens, lambda n: chances, confident=sure, seed=seed)
            assert seconds <= (1 + BOUND) * tokens * costs.plain_s + costs.round_s("head", BLOCK, True)
    assert tried.parked


def test_no_sequence_of_acceptances_breaks_the_bound() -> None:
    """Whatever a head does, even one that is good until it is trusted and then stops."""

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(0, BLOCK), min_size=1, max_size=40), st.sampled_from([FLAT, STEEP, STEPPED]))
    def check(pattern: list[int], costs: Costs) -> None:
        tried, made, seconds = policy(costs), 0, 0.0
        tried.begin()
        for wanted in itertools.cycle(pattern):
            source = tried.choose(())
            scheduled = tried.length([0.9] * BLOCK, BLOCK) if source == "head" else 0
            accepted = min(scheduled, wanted)
            tried.observe(scheduled, accepted)
            made, seconds = made + accepted + 1, seconds + costs.round_s(source, scheduled, True)
            assert seconds <= costs.plain_s * (made + BOUND / 2 * (LONG + made)) + 1e-6
            if made > 3000:
                break

    check()


def test_a_head_that_comes_to_help_is_resumed() -> None:
    def head(n: int) -> list[float]:
        return [0.0 if n < 5000 else 0.9] * BLOCK

    tried = policy()
    seconds, rounds = simulate(tried, 20_000, head)
    assert not tried.parked
    fast = best_fixed(FLAT, [0.9] * BLOCK)[0]
    assert seconds < 5000 * (1 + BOUND) + 15_000 / fast * 1.05
    assert sum(source == "head" for source, _ in rounds[-1000:]) > 950


def test_a_head_that_stops_helping_is_parked() -> None:
    tried = policy()
    seconds, rounds = simulate(tried, 20_000, lambda n: [0.9 if n < 5000 else 0.0] * BLOCK)
    assert tried.parked
    fast = best_fixed(FLAT, [0.9] * BLOCK)[0]
    assert seconds < 5000 / fast * 1.05 + 15_000 * (1 + BOUND)
    probes = sum(source == "head" for source, _ in rounds[-5000:])
    assert 5000 / tried.interval * 0.7 <= probes <= 5000 / tried.interval * 1.3


def test_overconfidence_is_seen_through() -> None:
    """A head that says 0.99 of every token, however far from the anchor; the best length is chosen all the same."""
    chances = [0.8 * 0.8**k for k in range(BLOCK)]
    rate, length = best_fixed(FLAT, chances)
    seconds, _ = simulate(policy(), 20_000, lambda n: chances, confident=lambda c: 0.99)
    assert length < BLOCK and 20_000 / seconds > 0.97 * rate


def test_confidences_that_tell_blocks_apart_are_used() -> None:
    """Half of the blocks are good; verifying those alone is quicker than any fixed length."""
    kinds = ([0.95] * BLOCK, [0.1] * BLOCK)
    numbers = random.Random(3)
    seconds, rounds = simulate(
        policy(STEEP_ROWS), 20_000, lambda n: kinds[numbers.random() < 0.5], confident=lambda c: c
    )
    both = [
        (1 + (sum(survival(kinds[0])[:k]) + sum(survival(kinds[1])[:k])) / 2) / STEEP_ROWS.round_s("head", k, True)
        for k in range(1, BLOCK + 1)
    ]
    assert 20_000 / seconds > 1.05 * max(both)
    assert {k for _, k in rounds} >= {0, BLOCK}


STEEP_ROWS = Costs(1.0, 1.0, CostCurve((1, 8), (1.0, 3.5), 0.1))


def test_lookup_alone_and_beside_a_head() -> None:
    """Every second hundred of tokens repeats what was said; the head is good for the others."""

    def lookup(n: int) -> list[float]:
        return [0.95 if n // 100 % 2 else 0.05] * BLOCK

    alone, rounds = simulate(policy(head=False), 10_000, lambda n: (), lookup)
    assert alone < 8000 and any(s == "lookup" for s, _ in rounds)
    never, _ = simulate(policy(head=False), 10_000, lambda n: (), lambda n: [0.02] * BLOCK)
    assert never <= 10_000 * (1 + BOUND)
    good = [0.9] * BLOCK
    repeats = [0.98] * BLOCK
    _, rounds = simulate(policy(), 10_000, lambda n: good, lambda n: repeats if n % 200 < 100 else ())
    assert {s for s, _ in rounds} >= {"head", "lookup"}
    _, only_head = simulate(policy(), 10_000, lambda n: good)
    assert len(rounds) < len(only_head)


def test_following_is_given_up_where_it_is_too_dear() -> None:
    """Letting a useless head follow costs 10 % of a round here: the bound holds by leaving it behind."""
    dear = Costs(1.0, 1.1, FLAT.curve)
    tried, seconds = policy(dear), 0.0
    for answer in range(20):
        seconds += simulate(tried, 500, lambda n: [0.0] * BLOCK, seed=answer)[0]
    assert tried.interval == float("inf")
    assert seconds <= 10_000 * (1 + BOUND)


def test_the_same_rounds_give_the_same_choices() -> None:
    def run() -> tuple[float, list[tuple[Source, int]]]:
        return simulate(policy(), 3000, lambda n: [0.7] * BLOCK, lambda n: [0.3] * BLOCK)

    assert run() == run()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.data())
def test_admission_is_the_best_prefix(chances: list[float], data: st.DataObject) -> None:
    """Where nothing is learnt on the way: brute force over all prefixes, whatever the costs."""
    steps = data.draw(st.lists(st.floats(0, 2), min_size=len(chances), max_size=len(chances)))
    seconds = list(itertools.accumulate(steps, initial=1.0))
    rates = [expected(chances[:k]) / seconds[k] for k in range(len(chances) + 1)]
    assert rates[admitted(chances, chances, seconds)] == pytest.approx(max(rates))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1), st.floats(0.01, 2))
def test_with_straight_costs_it_is_algorithm_1(chances: list[float], typical: float, slope: float) -> None:
    seconds = [1.3 + slope * k for k in range(len(chances) + 1)]
    got = admitted(chances, [typical] * len(chances), seconds)
    a = survival(chances)
    wanted = algorithm1([a], lambda rows: 1 / seconds[rows - 1])[0]
    value = [(1 + sum(a[:k])) / seconds[k] for k in range(len(chances) + 1)]
    assert got == wanted or value[got] == pytest.approx(value[wanted], rel=1e-9)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.data())
def test_admission_of_a_token_does_not_depend_on_those_behind_it(chances: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(chances) - 1))
    other = chances[:k] + data.draw(st.lists(st.floats(0, 1), min_size=len(chances) - k, max_size=len(chances) - k))
    seconds = [1.0, 1.6, *(1.7 + 0.02 * j for j in range(len(chances) - 1))]
    typical = [0.5] * len(chances)
    assert min(admitted(chances, typical, seconds), k) == min(admitted(other, typical, seconds), k)


def test_survivals_are_updated_by_what_was_verified_alone() -> None:
    tried = policy()
    tried.begin()
    assert tried.choose(()) == "head"
    tried.length([0.9] * BLOCK, BLOCK)
    before = [tried._typical.mean(k, 0.5) for k in range(BLOCK)]
    tried.observe(5, 2)
    after = [tried._typical.mean(k, 0.5) for k in range(BLOCK)]
    assert [b < a for b, a in zip(before, after, strict=True)] == [True, True, *[False] * 5]
    assert [b > a for b, a in zip(before, after, strict=True)] == [False, False, True, *[False] * 4]


def test_estimates_forget() -> None:
    cell = Survivals(1)
    for survived in (False,) * 500 + (True,) * 200:
        cell.saw(0, survived)
    assert cell.mean(0, 0.5) > 0.8


def test_costs_must_be_times() -> None:
    with pytest.raises(InputError, match="plain_s"):
        Costs(0.0, 1.0, FLAT.curve)
