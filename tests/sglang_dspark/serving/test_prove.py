"""A proof holds for a right server and fails for wrong ones. Servers are a small chain of tokens in this process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sglang_dspark.errors import InputError
from sglang_dspark.serving import load, prove
from sglang_dspark.serving.choice import restrict
from sglang_dspark.serving.client import Answer, Ask, Client

V = 40
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 2.0
LOGS = torch.log_softmax(TABLE, -1)


class Chain(Client):
    """Answers as SGLang does, for a model whose next token depends on the last. `wrong` says what it does wrong."""

    def __init__(self, wrong: str = "", noise: float = 0.0) -> None:
        self.url, self._wrong, self._noise = wrong or "right", wrong, noise
        self._dice = random.Random(11)
        self._known: dict[Any, list[float]] = {}

    def _weights(self, last: int, sampling: dict[str, Any]) -> list[float]:
        key = (last, *sorted(sampling.items()))
        if key not in self._known:
            limits = [("top_k", V), ("top_p", 1.0), ("min_p", 0.0)]
            given = [torch.tensor([d if self._wrong == "no limits" else sampling.get(k, d)]) for k, d in limits]
            scaled = TABLE[last][None] / (sampling["temperature"] * (1.25 if self._wrong == "warmer" else 1.0))
            self._known[key] = restrict(scaled, *given)[0].softmax(0).tolist()
        return self._known[key]

    def together(self, asks: Any, most: int = 16) -> list[Answer]:
        return [self.ask(a) for a in asks]

    def ask(self, asked: Ask) -> Answer:
        sampling, text = asked.sampling, list(asked.prompt)
        logs = LOGS
        tokens, told, tops = [], [], []
        for n in range(sampling["max_new_tokens"]):
            row = logs[text[-1]]
            ranked = row.sort(descending=True)
            token = int(ranked.indices[0])
            if sampling.get("temperature"):
                token = self._dice.choices(range(V), self._weights(text[-1], sampling))[0]
            elif self._wrong == "second best" and n == 5:
                token = int(ranked.indices[1])
            elif self._wrong == "short" and n == 5:
                break
            tokens.append(token)
            text.append(token)
            told.append([float(row[token]) + self._noise, token, None])
            best = zip(ranked.values, ranked.indices, strict=True)
            tops.append([[float(v), int(i), None] for v, i in best][: asked.more.get("top_logprobs_num", 0)])
        if not asked.more:
            return Answer(tuple(tokens), {})
        read = [[None, asked.prompt[0], None]] + [
            [float(logs[a, b]), b, None] for a, b in zip(asked.prompt, asked.prompt[1:], strict=False)
        ]
        start = asked.more.get("logprob_start_len", 0)
        meta = {"output_token_logprobs": told, "output_top_logprobs": tops, "input_token_logprobs": read[start:]}
        return Answer(tuple(tokens), meta)


ASKS = [Ask("chain", (n, n + 7), {"max_new_tokens": 12}) for n in range(6)]


def proof(plain: Chain, dspark: Chain) -> prove.Proof:
    return prove.prove(plain, dspark, ASKS, 1500, lambda text: None)


def test_a_right_server_is_proved() -> None:
    found = proof(Chain(), Chain())
    assert found.proved and not found.differences and found.noise == 0
    assert [f.freedom > 10 for f in found.fits] == [True, True]
    assert found.to_dict()["proved"] is True and found.requests == {"chain": 6} and found.tokens == 72


def test_an_unlikely_fit_is_enough_to_fail() -> None:
    fits = [prove.Fit({}, 500, 10, 0.5, p, strays) for p, strays in ((0.3, 0), (prove.UNLIKELY / 2, 0), (0.3, 1))]
    assert [prove.Proof(fits=[fits[0], f]).proved for f in fits] == [True, False, False]
    assert not prove.Proof(fits=[prove.Fit({}, 500, 0, 1.0, 1.0, 0)]).proved


@pytest.mark.parametrize("wrong", ["second best", "short", "warmer", "no limits"])
def test_a_wrong_one_is_not(wrong: str) -> None:
    found = proof(Chain(), Chain(wrong))
    assert not found.proved
    assert bool(found.differences) is (wrong in ("second best", "short"))
    if wrong == "no limits":
        assert all(f.strays for f in found.fits)
    if wrong == "warmer":
        assert min(f.dspark for f in found.fits) < prove.UNLIKELY < min(f.plain for f in found.fits)


def test_a_lead_within_the_noise_of_the_plain_server_decides_nothing() -> None:
    found = proof(Chain(noise=100.0), Chain("second best"))
    assert found.noise == pytest.approx(100.0) and found.differences
    assert all(d.numerics and d.position == 5 and d.margin > 0 for d in found.differences)
    assert found.proved


def test_the_exact_distribution_is_that_of_the_definition() -> None:
    sampling = {"temperature": 1.0, "top_k": 6, "top_p": 0.95, "min_p": 0.02}
    chances = prove.exact(Chain(), (3,), sampling)
    assert sum(chances.values()) == pytest.approx(1)
    p, joint = TABLE.softmax(-1), 1.0
    first = max(chances, key=lambda t: chances[t])
    for last, token in zip((3, *first), first, strict=False):
        order = p[last].sort(descending=True)
        kept = [
            int(i)
            for n, i in enumerate(order.indices)
            if n < 6 and order.values[:n].sum() <= 0.95 and p[last, i] >= 0.02 * order.values[0]
        ]
        joint *= float(p[last, token] / p[last, kept].sum())
    assert chances[first] == pytest.approx(joint)


@pytest.mark.parametrize(
    "chi2, freedom, p", [(3.841, 1, 0.05), (18.307, 10, 0.05), (29.588, 10, 0.001), (50.0, 50, 0.473)]
)
def test_p_values_are_those_of_tables(chi2: float, freedom: int, p: float) -> None:
    assert prove.p_value(chi2, freedom) == pytest.approx(p, rel=0.08)


def test_speculation_stops_paying_where_it_never_wins_again() -> None:
    def point(server: str, users: int, rate: float) -> load.Point:
        return load.Point(server, users, rate, rate / users, 0.1, 0.01, None)

    def points(rates: list[float]) -> list[load.Point]:
        users = [1, 2, 4]
        return [point("plain", n, 10.0) for n in users] + [point("d", n, r) for n, r in zip(users, rates, strict=True)]

    assert load.turning_point(points([12, 9, 11]), "plain", "d") is None
    assert load.turning_point(points([12, 9, 8]), "plain", "d") == 2
    assert load.turning_point(points([9, 9, 8]), "plain", "d") == 1


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"127\.0\.0\.1:9 cannot be reached"):
        Client("http://127.0.0.1:9").context()
