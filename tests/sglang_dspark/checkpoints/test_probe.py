"""The probe tells layers off by one and an anchor of its own from a head that is merely weak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.checkpoints.findings import Finding
from sglang_dspark.checkpoints.probe import Agreement, acceptance, measure

VOCABULARY, LAYERS, BLOCK = 50, 8, 4


def after(token: int) -> int:
    return (7 * token + 3) % VOCABULARY


@dataclass
class Counting:
    """A target whose next token is `after` the last; layer k's output of a token is [k, token]."""

    taps: tuple[int, ...] = ()

    def reset(self) -> None:
        self.last: list[int] = []

    def forward(self, tokens: Sequence[int], last_only: bool = False) -> Tensor:
        self.last = list(tokens)
        return torch.nn.functional.one_hot(torch.tensor([after(tokens[-1])]), VOCABULARY).float()

    def features(self, count: int) -> Tensor:
        return torch.tensor([[x for k in self.taps for x in (k, t)] for t in self.last[:count]], dtype=torch.float32)


class Reader:
    """A draft that is right where it sees the layers that it was trained on, `right` being their first, and
    `shift` positions late; else it repeats the anchor.
    """

    block = BLOCK

    def __init__(self, right: int, taps: tuple[int, ...] = (2, 4), shift: int = 0) -> None:
        self.config: Any = SimpleNamespace(target_layer_ids=taps)
        self.right, self.shift = right, shift

    def reset(self) -> None:
        self.rows = torch.zeros(0, 4)

    def observe(self, features: Tensor, position: int) -> None:
        assert position == len(self.rows) and features.shape[1] == 4
        self.rows = torch.cat([self.rows, features])

    def draft(self, anchor: int, position: int, choose: Any = None) -> Any:
        assert position == len(self.rows)
        seen = set(self.rows[:, 0].tolist())
        tokens, token = [], anchor
        for k in range(BLOCK):
            token = after(token) if k >= self.shift else token
            tokens.append(token if seen == {self.right} and (k or not self.shift) else anchor)
        # Half a nat more or less from block to block, as real heads have it.
        sure = 3.0 + position % 2 / 2
        return SimpleNamespace(
            tokens=tokens, logits=sure * torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY)
        )


def probed(draft: Reader, layers: int = LAYERS) -> tuple[dict[int, Agreement], Finding]:
    found = measure(Counting(), draft, [[1, 2, 3], [9, 4]], layers)
    return found, next(iter(acceptance(found)))


def test_a_right_reading() -> None:
    found, finding = probed(Reader(2))
    assert found[0].survival == [1.0] * BLOCK and found[0].accepted == 5.0 and found[0].blocks == 2 * 48
    assert finding.state == "ok" and "5.00 tokens a round over 96 blocks" in finding.text


@pytest.mark.parametrize("off", [-1, 1])
def test_layers_off_by_one(off: int) -> None:
    found, finding = probed(Reader(2 + off))
    assert finding.state == "failure" and f"off by one: with each moved by {off:+d}" in finding.text
    assert finding.remedy == f"add {off} to each tapped layer" and found[off].accepted == 5.0


def test_an_anchor_of_its_own() -> None:
    _, finding = probed(Reader(2, shift=1))
    assert finding.state == "failure" and "anchor is read wrongly" in finding.text
    assert "false" in finding.remedy


def test_a_weak_head() -> None:
    _, finding = probed(Reader(99))
    assert finding.state == "warning" and "weak" in finding.text


def test_shifts_beyond_the_target_are_left_out() -> None:
    assert set(measure(Counting(), Reader(-1, (-1, 1)), [[1]], LAYERS)) == {0, 1}
    assert set(measure(Counting(), Reader(2), [[1]], 5)) == {0, -1}


def test_the_taps_are_put_back() -> None:
    target = Counting((5,))
    measure(target, Reader(2), [[1, 2]], LAYERS)
    assert target.taps == (5,)


def test_it_stops_in_time() -> None:
    assert measure(Counting(), Reader(2), [[1], [2], [3]], LAYERS, seconds=0.0)[0].blocks == 48


Fault = Callable[[dict[int, Agreement]], dict[int, Agreement]]


def test_what_agreement_counts() -> None:
    found = Agreement()
    found.add([1, 2, 3], 0, [1, 2, 9])
    found.add([0, 1, 2], 0, [1, 2, 3])
    assert (found.survived, found.late, found.accepted) == ([1, 1, 0], [0, 1, 1], 2.0)
    assert replace(found).survival == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("other", [False, True])
def test_blocks_that_overlap_count_as_less_evidence(other: bool) -> None:
    """Neighbouring blocks are about the same tokens, so chance moves them together. On two readings that are equally
    good, the bound is passed as seldom as it would be by independent ones; on a better one it is passed.
    """
    numbers, passed = torch.Generator().manual_seed(1), 0
    for _ in range(200):
        noise = torch.randn(240 + BLOCK - 1, generator=numbers).unfold(0, BLOCK, 1).mean(1)
        one, two = (Agreement(240, [0] * BLOCK, likelihoods=v) for v in ((noise + other).tolist(), [0.0] * 240))
        passed += abs(one.beyond(two)) > 3.0
    assert passed == 200 if other else passed <= 4


def test_a_reading_that_may_be_better_is_not_passed_over() -> None:
    found, _ = probed(Reader(2))
    found[1].likelihoods = [x + (-1) ** (i // 8) + 0.6 for i, x in enumerate(found[0].likelihoods)]
    assert 2.0 < found[1].beyond(found[0]) < 4.0
    assert "Taps moved by +1 draft as well" in next(iter(acceptance(found))).text


def test_a_head_that_its_layers_neighbours_serve_as_well() -> None:
    found, _ = probed(Reader(2))
    for shift, z in ((1, 0.0), (-1, 9.0)):
        found[shift].likelihoods = [x - z * (i % 3) for i, x in enumerate(found[0].likelihoods)]
    assert found[0].beyond(found[1]) == 0.0 and found[0].beyond(found[-1]) > 10
    finding = next(iter(acceptance(found)))
    assert finding.state == "ok" and "Taps moved by +1 draft as well, so this cannot tell" in finding.text
