"""Whether a server with DSPARK answers as a plain one does.

Greedy answers are compared token by token, one request at a time and many at once. Where they part, the plain server's
two likeliest tokens there are compared: a lead within the noise of its own arithmetic decides nothing. That noise is
measured first, plain against plain: the same answers one at a time, many at once, and read as prompts. Sampled answers
are compared with the plain server's exact distribution of three tokens by a χ² test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sglang_dspark.errors import InputError
from sglang_dspark.serving.choice import restrict
from sglang_dspark.serving.client import Answer, Ask, Client
from sglang_dspark.serving.stress import AT_END

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.5, "top_k": 4},
    {"temperature": 1.0, "top_k": 6, "top_p": 0.95, "min_p": 0.02},
)
"""The second's temperature is 1 because a server tells probabilities at 1 alone, of which top-p sums up some."""
DEPTH, SEEN = 3, 32
UNLIKELY = 1e-4
"""A χ² test fails where a right server would be further off once in 1 / UNLIKELY runs."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a drafted answer parts from the plain one: the position in the answer, the plain server's lead there in
    logarithms of probability, and whether that is within its noise.
    """

    kind: str
    request: int
    batched: bool
    position: int
    margin: float
    numerics: bool


@dataclass(frozen=True, slots=True)
class Fit:
    """A χ² test of sampled tokens: with how many degrees of freedom, and how likely it is for each server to be that
    far off or further. Tokens outside the distribution are `strays`.
    """

    sampling: dict[str, Any]
    samples: int
    freedom: int
    plain: float
    dspark: float
    strays: int


@dataclass(slots=True)
class Proof:
    """What was compared, and what was found."""

    requests: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    noise: float = 0.0
    plain_differences: int = 0
    differences: list[Difference] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)

    @property
    def proved(self) -> bool:
        """Whether nothing speaks against it."""
        identical = all(d.numerics for d in self.differences)
        return identical and all(f.dspark > UNLIKELY and not f.strays and f.freedom > 0 for f in self.fits)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"proved": self.proved, **asdict(self)}


def prove(plain: Client, dspark: Client, asks: Sequence[Ask], samples: int, say: Say) -> Proof:
    """Compare two servers. `say` is told of each step."""
    proof = Proof(dict(Counter(a.kind for a in asks)))
    say("plain against plain")
    single, batched = [plain.ask(a) for a in asks], plain.together(asks)
    proof.tokens = sum(len(a.tokens) for a in single)
    proof.plain_differences = sum(a.tokens != b.tokens for a, b in zip(single, batched, strict=True))
    # An answer at the context's end is too long to be read as a prompt.
    whole = [(a, b) for a, b in zip(asks, single, strict=True) if _open(a) and a.kind != AT_END]
    proof.noise = max((_noise(plain, a, b) for a, b in whole), default=0.0)
    for many in (False, True):
        say("DSPARK, many at once" if many else "DSPARK, one at a time")
        answers = dspark.together(asks) if many else [dspark.ask(a) for a in asks]
        for number, (asked, a, b, got) in enumerate(zip(asks, single, batched, answers, strict=True)):
            if got.tokens not in (a.tokens, b.tokens):
                proof.differences.append(_difference(plain, asked, number, many, a, got, proof.noise))
    for sampling in SETTINGS:
        say(f"sampling with {', '.join(f'{k} {v:g}' for k, v in sampling.items())}")
        proof.fits.append(fit(plain, dspark, [a.prompt for a in asks if _open(a)], sampling, samples))
    return proof


def _open(asked: Ask) -> bool:
    """Whether nothing restricts its tokens, so that its probabilities are those of the text."""
    return "json_schema" not in asked.sampling


def _noise(plain: Client, asked: Ask, answer: Answer) -> float:
    """The largest difference of the logarithm of a token's probability, written or read."""
    written = plain.ask(Ask(asked.kind, asked.prompt, asked.sampling, {"return_logprob": True}))
    told = {"return_logprob": True, "logprob_start_len": len(asked.prompt)}
    read = plain.ask(Ask(asked.kind, asked.prompt + answer.tokens[:-1], {"max_new_tokens": 1}, told))
    if written.tokens != answer.tokens:
        return 0.0
    pairs = zip(written.meta["output_token_logprobs"][1:], read.meta["input_token_logprobs"][1:], strict=False)
    return max((abs(a[0] - b[0]) for a, b in pairs if a[0] is not None and b[0] is not None), default=0.0)


def _difference(
    plain: Client, asked: Ask, number: int, many: bool, wanted: Answer, got: Answer, noise: float
) -> Difference:
    position = next(
        (i for i, (a, b) in enumerate(zip(wanted.tokens, got.tokens, strict=False)) if a != b),
        min(len(wanted.tokens), len(got.tokens)),
    )
    margin = math.inf
    if _open(asked) and position < min(len(wanted.tokens), len(got.tokens)):
        before = asked.prompt + wanted.tokens[:position]
        # At the context's end it cannot be asked.
        with suppress(InputError):
            first, second = _top(plain, [before], 2)[0][:2]
            margin = first[1] - second[1]
    return Difference(asked.kind, number, many, position, margin, margin <= 2 * noise)


def _top(plain: Client, prompts: Sequence[tuple[int, ...]], count: int) -> list[list[tuple[int, float]]]:
    """The likeliest tokens after each prompt with the logarithms of their probabilities."""
    told = {"return_logprob": True, "top_logprobs_num": count}
    answers = plain.together(Ask("", p, {"max_new_tokens": 1}, told) for p in prompts)
    return [[(int(t[1]), float(t[0])) for t in a.meta["output_top_logprobs"][0]] for a in answers]


def exact(plain: Client, prompt: tuple[int, ...], sampling: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The plain server's joint distribution of the DEPTH tokens after a prompt."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    limits = [torch.tensor([sampling.get(n, d)]) for n, d in (("top_k", SEEN), ("top_p", 1.0), ("min_p", 0.0))]
    for _ in range(DEPTH):
        tops = _top(plain, [prompt + chosen for chosen in chances], SEEN)
        longer: dict[tuple[int, ...], float] = {}
        for (chosen, p), top in zip(chances.items(), tops, strict=True):
            logs = torch.tensor([lp for _, lp in top], dtype=torch.float64)
            # What was not told stands behind in parts no likelier, so that the others keep their probabilities.
            rest, least = float(1 - logs.exp().sum()), float(logs.min().exp())
            parts = max(math.ceil(rest / least), 0) if rest > 1e-9 else 0
            behind = torch.full((parts,), math.log(rest / parts) if parts else 0.0, dtype=torch.float64)
            q = restrict(torch.cat([logs, behind])[None] / sampling["temperature"], *limits)
            shares = q[0, : len(top)].softmax(0).tolist()
            longer |= {(*chosen, t): p * share for (t, _), share in zip(top, shares, strict=True) if share > 0}
        chances = longer
    return chances


def fit(
    plain: Client, dspark: Client, prompts: Sequence[tuple[int, ...]], sampling: dict[str, Any], samples: int
) -> Fit:
    """Test both servers on the prompt after which most tokens are likely."""
    tops = _top(plain, prompts, SEEN)
    prompt = prompts[max(range(len(prompts)), key=lambda i: -sum(lp * math.exp(lp) for _, lp in tops[i]))]
    chances = exact(plain, prompt, sampling)
    asks = [Ask("", prompt, {"max_new_tokens": DEPTH, **sampling})] * samples
    seen = [Counter(a.tokens for a in server.together(asks)) for server in (plain, dspark)]
    freedom = _cells(seen[0], chances, samples)[1]
    strays = sum(n for tokens, n in seen[1].items() if tokens not in chances)
    likely = [p_value(*_cells(s, chances, samples)) for s in seen]
    return Fit(sampling, samples, freedom, likely[0], likely[1], strays)


def _cells(seen: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float], samples: int) -> tuple[float, int]:
    """χ² and its degrees of freedom; what is expected fewer than five times is counted together."""
    cells = [(seen[t], p * samples) for t, p in chances.items() if p * samples >= 5]
    rest = samples - sum(n for n, _ in cells), samples - sum(e for _, e in cells)
    cells += [rest] if rest[1] > 1 else []
    return sum((n - e) ** 2 / e for n, e in cells), len(cells) - 1


def p_value(chi2: float, freedom: int) -> float:
    """The probability of a larger χ², by Wilson and Hilferty's approximation."""
    if freedom < 1:
        return 1.0
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((chi2 / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))
