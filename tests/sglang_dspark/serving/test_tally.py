"""Counts over rounds, against the metrics that are functions of rounds."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dspark.decoding.rounds import Round, conditional_by_position, summarise, survival_by_position
from sglang_dspark.serving.tally import Tally

BLOCK = 4
SEEN = [(4, 4), (4, 0), (3, 3), (2, 1), (0, 0), (4, 2)]


def test_a_tally_agrees_with_rounds() -> None:
    tally = Tally(BLOCK)
    for part in (SEEN[:2], SEEN[2:]):
        tally.add(np.array([s for s, _ in part]), np.array([a for _, a in part]), None)
    rounds = [
        Round("r", i + 1, i, 0, (1, 2, 3, 4), (), s, a, 9, (*(1, 2, 3, 4)[:a], 9), None, 0.0, 0.1)
        for i, (s, a) in enumerate(SEEN)
    ]
    counted, summary = tally.to_dict(), summarise(rounds)
    for name in ("rounds", "drafted", "scheduled", "accepted", "mean_accepted_length", "draft_acceptance_rate"):
        assert counted[name] == getattr(summary, name), name
    assert counted["survival"] == survival_by_position(rounds, BLOCK)
    assert counted["conditional"] == conditional_by_position(rounds, BLOCK)


def test_reliability_is_of_the_tokens_that_were_reached() -> None:
    tally = Tally(BLOCK)
    confidence = np.array([[0.95, 0.92, 0.15, 0.5], [0.12, 0.99, 0.99, 0.99], [0.97, 1.0, 0.5, 0.5]])
    tally.add(np.array([4, 4, 2]), np.array([2, 0, 2]), confidence)
    low, high = tally.to_dict()["reliability"]
    assert (low["from"], low["tokens"], low["accepted"]) == (0.1, 2, 0.0)
    assert low["predicted"] == pytest.approx((0.15 + 0.12) / 2)
    assert (high["from"], high["tokens"], high["accepted"]) == (0.9, 4, 1.0)


def test_metrics_follow_the_tally() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from sglang_dspark.serving.metrics import Metrics

    metrics, tally = Metrics(BLOCK), Tally(BLOCK)
    for part in (SEEN[:3], SEEN[3:]):
        tally.add(np.array([s for s, _ in part]), np.array([a for _, a in part]), np.full((3, BLOCK), 0.35))
        metrics.tell(tally)
    value = prometheus.REGISTRY.get_sample_value
    assert value("dspark:rounds_total") == len(SEEN)
    assert value("dspark:position_accepted_total", {"position": "2"}) == tally.accepted[1]
    assert value("dspark:position_reached_total", {"position": "4"}) == tally.reached[3]
    assert value("dspark:confidence_tokens_total", {"bin": "0.3"}) == tally.reached.sum()
