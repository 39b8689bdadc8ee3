"""The last word on a race: identical or not, how much faster, and in one sentence why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from local_runner.identity import Identity
from sglang_dspark.decoding.rounds import Round, decode_rounds, summarise
from ui.messages import Message, verdict_message
from ui.words import words

DRAW = 0.02
"""Speed-ups nearer to 1 than this are called a draw."""


def verdict(
    plain: Sequence[Round],
    dspark: Sequence[Round],
    identical: bool | None,
    language: str,
    first_difference: dict[str, Any] | None = None,
    remark: str = "",
) -> Message:
    """The verdict message on both lanes of a race; `remark` follows its reason."""
    a, b = summarise(plain), summarise(dspark)
    speedup = b.tokens_per_s / a.tokens_per_s if a.tokens_per_s and b.tokens_per_s else None
    sentences = [reason(plain, dspark, speedup, language), remark]
    return verdict_message(identical, speedup, " ".join(s for s in sentences if s), first_difference)


def reason(plain: Sequence[Round], dspark: Sequence[Round], speedup: float | None, language: str) -> str:
    """Why it went as it did: what a round of DSpark commits, and what it costs in steps of plain decoding.

    The speed-up is the tokens of a round over its cost, all measured in this race. Empty where nothing can be compared.
    """
    rounds, steps = decode_rounds(dspark), decode_rounds(plain)
    if speedup is None or not rounds or not steps:
        return ""
    step = sum(r.draft_s + r.verify_s for r in steps) / len(steps)
    kind = "wins" if speedup > 1 + DRAW else "loses" if speedup < 1 - DRAW else "draw"
    draft = sum(r.draft_s for r in rounds) / len(rounds) / step
    verify = sum(r.verify_s for r in rounds) / len(rounds) / step
    return words(language)[f"reason_{kind}"].format(
        tokens=sum(len(r.committed) for r in rounds) / len(rounds),
        rows=1 + sum(r.scheduled for r in rounds) / len(rounds),
        draft=draft,
        verify=verify,
        cost=draft + verify,
    )


def of_identity(identity: Identity) -> tuple[bool | None, dict[str, Any] | None, str]:
    """What a verdict message says of the runner's judgement: identical, first difference, and a remark."""
    if identity.verdict == "not comparable":
        return None, None, identity.sentence
    if not identity.differences:
        return True, None, ""
    first = identity.differences[0]
    difference = {
        "position": first.position,
        "margin": first.margin,
        "noise": identity.width_noise,
        "numerics": first.verdict == "numerics",
    }
    return False, difference, "" if first.verdict == "numerics" else identity.sentence
