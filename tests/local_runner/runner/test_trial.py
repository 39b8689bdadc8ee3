"""What is measured is what was put in, whatever else happens in a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from local_runner.runner.trial import measure
from sglang_dspark.errors import InputError

PROMPT = (1, 3, 1, 2)


def test_costs_are_found(engines: Callable[..., Any], clock: Any) -> None:
    engine = engines()
    profile = measure(engine, PROMPT, budget_s=1e4, clock=clock)
    assert profile.plain_s == pytest.approx(1.0)
    assert profile.parked_s == pytest.approx(1.002)
    assert profile.rows == (1, 2, 3, 4, 5)
    assert profile.seconds == pytest.approx([s + 0.002 for s in (1.0, 1.08, 1.13, 1.18, 1.22)])
    assert profile.draft_s == pytest.approx(0.5)
    assert profile.overhead_s == 0
    assert len(profile.tried) == 4 and profile.tried[0] > profile.tried[1] > 0
    assert all(0 <= s <= t for s, t in zip(profile.survived, profile.tried, strict=True))
    assert engine.drafter.block == 4 and type(engine.drafter).__name__ == "Drafter", "the engine is as it was"


def test_a_target_alone_is_measured_by_guesses(engines: Callable[..., Any], clock: Any) -> None:
    engine = engines(head=False, seconds=(1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5))
    profile = measure(engine, PROMPT, budget_s=1e4, clock=clock)
    assert profile.rows == tuple(range(1, 9)) and profile.seconds[-1] == pytest.approx(4.5)
    assert profile.draft_s == 0 and profile.parked_s == profile.plain_s and profile.tried == ()
    assert engine.drafter is None


def test_what_a_following_head_puts_off_is_counted(engines: Callable[..., Any], clock: Any) -> None:
    """A head that takes 0.02 s a token to catch up, once it drafts."""
    engine = engines()
    observed = 0
    observe, draft = engine.drafter.observe, engine.drafter.draft

    def count(n: int) -> None:
        nonlocal observed
        observed += n
        observe(n)

    def late(*args: Any) -> Any:
        nonlocal observed
        clock.now += 0.02 * observed
        observed = 0
        return draft(*args)

    engine.drafter.observe, engine.drafter.draft = count, late
    profile = measure(engine, PROMPT * 10, budget_s=1e4, clock=clock)
    assert profile.parked_s == pytest.approx(1.022, abs=0.001)


@pytest.mark.parametrize("budget", [0.0, 30.0, 100.0])
def test_the_budget_is_kept(engines: Callable[..., Any], clock: Any, budget: float) -> None:
    profile = measure(engines(), PROMPT, budget_s=budget, clock=clock)
    assert clock.now < budget + 16, (
        "a pass that is cut short needs its plain rounds, one row, all rows and a parked one"
    )
    assert {1, 5} <= set(profile.rows) and profile.costs().plain_s == pytest.approx(1.0)


def test_a_short_context_is_refused(engines: Callable[..., Any], clock: Any) -> None:
    with pytest.raises(InputError, match="--context-length"):
        measure(engines(context=12), PROMPT, clock=clock)
