"""The doctor's checks that read weights, a chunk at a time. The docstring of a check is what `--explain` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang_dspark.checkpoints.drafts import D2T
from sglang_dspark.checkpoints.findings import Effect, Finding, Subject, everywhere
from sglang_dspark.checkpoints.fit import is_float, named
from sglang_dspark.checkpoints.places import Folder
from sglang_dspark.checkpoints.spelling import OPTIONAL
from sglang_dspark.checkpoints.targets import TABLES
from sglang_dspark.checkpoints.tensors import Readable, list_tensors
from sglang_dspark.errors import InputError

F16_MAX = 65504.0
WHOLE = tuple(f"markov_head.{n}" for n in ("markov_w2.weight", "gate_proj.bias", "joint_proj.bias"))


@dataclass(slots=True)
class Numbers:
    """What one pass over a tensor leaves: its extremes, and how many elements are not finite."""

    low: float = float("inf")
    high: float = float("-inf")
    nan: int = 0
    infinite: int = 0


Seen = dict[str, Numbers]
Progress = Callable[[int, int], None]


def survey(s: Subject, progress: Progress = lambda done, total: None) -> Seen:
    """Read every floating-point weight of the draft once. `progress` is told bytes."""
    names = [n for n, t in s.draft.tensors.items() if is_float(t.dtype) and n != D2T]
    total, done = sum(s.draft.tensors[n].count * s.draft.tensors[n].dtype.itemsize for n in names), 0
    seen: Seen = {}
    for name in names:
        numbers = seen[name] = Numbers()
        for chunk in s.draft.tensors[name].chunks():
            finite = chunk.float()
            good = finite.isfinite()
            if not bool(good.all()):
                numbers.nan += int(finite.isnan().sum())
                numbers.infinite += int(finite.isinf().sum())
                finite = finite[good]
            if finite.numel():
                low, high = (float(v) for v in finite.aminmax())
                numbers.low, numbers.high = min(numbers.low, low), max(numbers.high, high)
            done += chunk.numel() * chunk.dtype.itemsize
            progress(done, total)
    return seen


def finite(s: Subject, seen: Seen) -> Iterator[Finding]:
    """Weights that are not numbers (NaN) or infinite make every logit of a block NaN, and its argmax token 0.

    The one place where infinities are meant is a vocabulary that was made whole: the Markov head of such a draft has
    them in its table W2 and in the biases of its gate or state.
    """
    broken = [n for n, v in seen.items() if v.nan or (v.infinite and n not in WHOLE)]
    barred = [n for n, v in seen.items() if v.infinite and n in WHOLE]
    if broken:
        yield Finding(
            "finite",
            "failure",
            f"{named(broken)} hold NaN or infinities.",
            "fetch or train it again",
            everywhere("fails", "weights are not finite"),
        )
    elif barred:
        yield Finding("finite", "note", f"{named(barred)} hold infinities, which bar tokens from being drafted.")
    else:
        yield Finding("finite", "ok", "All weights are finite.")


def untrained(s: Subject, seen: Seen) -> Iterator[Finding]:
    """A tensor whose elements are all alike was never trained: a norm of ones, a head of zeros.

    A Markov head of zeros is a draft without one; a confidence head of zeros says 0.5 to everything.
    """
    flat = [n for n, v in seen.items() if v.low == v.high and s.draft.tensors[n].count > 1]
    if flat:
        yield Finding("untrained", "warning", f"{named(flat)} hold one value only, as if never trained.")
    else:
        yield Finding("untrained", "ok", "No tensor is constant.")


def overflow(s: Subject, seen: Seen) -> Iterator[Finding]:
    """Numbers beyond ±65504 become infinite in float16. bfloat16 and float32 hold them."""
    large = [n for n, v in seen.items() if max(-v.low, v.high) > F16_MAX]
    if large:
        yield Finding("overflow", "warning", f"{named(large)} hold numbers that float16 cannot.", "run it in bfloat16")
    else:
        yield Finding("overflow", "ok", "Every weight fits float16.")


def copies(s: Subject, seen: Seen) -> Iterator[Finding]:
    """The draft's copies of the target's embedding and lm_head, compared with the target's, bit for bit.

    SGLang drops the copies. Where they are equal nothing is lost; a different lm_head means that the draft was trained
    with it, and drafts worse without.
    """
    own = [n for n in OPTIONAL if n in s.draft.tensors]
    if s.target is None or not isinstance(s.target.place, Folder) or not own or s.draft.reduced:
        return
    try:
        theirs = s.target.header.tensors if s.target.header else list_tensors(s.target.place)
    except InputError as error:
        yield Finding("copies", "note", f"The draft's copies were not compared: {error}")
        return
    for name in own:
        stored = next((n for n in TABLES[name] if n in theirs), None)
        table = theirs.get(stored or next((n for n in TABLES["embed_tokens.weight"] if n in theirs), ""))
        what = name.removesuffix(".weight")
        if table is None or getattr(table, "packing", None) is not None:
            yield Finding("copies", "note", f"The target's {what} cannot be compared with the draft's copy.")
        elif same(s.draft.tensors[name], table):
            yield Finding("copies", "ok", f"The draft's {what} is the target's.")
        else:
            why = f"it uses the target's {what} instead of the draft's own"
            yield Finding(
                "copies",
                "warning",
                f"The draft's {what} differs from the target's.",
                "use an engine that keeps it",
                {"sglang": Effect("worse", why), "sglang-dspark": Effect("fails", f"SGLang {why[3:]}")},
            )


def same(own: Readable, theirs: Readable) -> bool:
    """Whether two tensors hold the same numbers once the first is rounded to the type of the second."""
    if own.shape != theirs.shape:
        return False
    pairs = zip(own.chunks(), theirs.chunks(), strict=True)
    return all(torch.equal(a.to(b.dtype), b) for a, b in pairs)


CHECKS: dict[str, Callable[[Subject, Seen], Iterator[Finding]]] = {
    c.__name__: c for c in (finite, untrained, overflow, copies)
}


def examine_weights(s: Subject, progress: Progress = lambda done, total: None) -> list[Finding]:
    """Every finding of the checks that read weights."""
    seen = survey(s, progress)
    return [finding for check in CHECKS.values() for finding in check(s, seen)]
