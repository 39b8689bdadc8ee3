"""What else could be done: alternatives that a plan rejects, and the smallest changes with which a pair would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from local_runner.footprint import Footprint
from local_runner.placement.items import Wishes, spared_by_rings
from local_runner.placement.plan import Change, Plan, Rejected

Fits = Callable[[Footprint, Wishes], bool]

STEP = 256
"""Tokens: contexts are proposed in multiples of it."""
TENTH = 10**8
"""Bytes: sizes of files are proposed in multiples of it."""
LEAST_BITS = 1.5
"""Bits a weight below which no quantisation of a target is worth proposing."""


def rejected(plan: Plan) -> tuple[Rejected, ...]:
    """The alternatives, with what each would cost or free."""
    return (*_tables_elsewhere(plan), *_of_memory(plan), *_too_many_rows(plan), *_without_draft(plan))


def _tables_elsewhere(plan: Plan) -> Iterator[Rejected]:
    """The Markov tables in the other memory."""
    pools = plan.machine.pools
    slow, fast = pools[-1], pools[0]
    for placed in plan.placed:
        if placed.kind not in ("W1", "W2") or slow.bandwidth == fast.bandwidth:
            continue
        own = next(p for p in pools if p.name == placed.pool)
        other = fast if own is slow else slow
        change = placed.round_s * own.bandwidth / other.bandwidth - placed.round_s
        if other is slow:
            yield Rejected(
                f"{placed.part} in {other.name}", f"frees {mb(placed.bytes)} of {own.name}, costs {us(change)} a round"
            )
        else:
            yield Rejected(
                f"{placed.part} in {other.name}",
                f"would save {us(-change)} a round; {other.name} saves more with other parts",
            )


def _of_memory(plan: Plan) -> Iterator[Rejected]:
    if any(pool.kind == "unified" for pool in plan.machine.pools):
        yield Rejected("offloading to the processor", "frees nothing: processor and graphics share one memory")
    if plan.loading == "read and drop":
        whole = plan.footprint.transient(True)
        yield Rejected(
            "mapping the files",
            f"counts {mb(whole)} as resident again, against {mb(plan.transient)} when read and dropped",
        )
    if spared := spared_by_rings(plan.footprint, plan.wishes):
        yield Rejected(
            "dropping rows outside sliding windows",
            f"frees {mb(spared)}, but rows that a rejected draft pushed out would be lost, and no engine here does",
        )


def _too_many_rows(plan: Plan) -> Iterator[Rejected]:
    most, active = plan.machine.max_rows, plan.wishes.active
    if most is not None and plan.verify_rows > most:
        rows = f"verifying {plan.verify_rows} rows at once"
        if active > most:
            yield Rejected(rows, f"may hang this machine: decode at most {most} users together")
        else:
            yield Rejected(rows, f"may hang this machine: verify at most {most // active - 1} drafts of each user")


def _without_draft(plan: Plan) -> Iterator[Rejected]:
    draft = plan.footprint.draft
    if draft is not None and plan.break_even is not None:
        yield Rejected(
            "decoding without the draft",
            f"is as quick at an accepted length of {plan.break_even:.2f}, quicker below; frees {mb(draft.bytes)}",
        )


def smallest_changes(plan: Plan, fits: Fits) -> tuple[Change, ...]:
    """Changes that make it fit, each alone where one is enough, the mildest first; every one was tried."""
    f, w = plan.footprint, plan.wishes
    found = list(_single(f, w, fits))
    if not found:
        small = replace(w, cache_dtype="int8", head_dtype="int8" if f.draft else None, users=1)
        if (context := largest(w.context, lambda n: fits(f, replace(small, context=n)))) is not None:
            found.append(Change(_combined(context, w, f), replace(small, context=context)))
    if f.draft is not None and fits(replace(f, draft=None), w):
        found.append(Change(f"decode without the draft, which frees {mb(f.draft.bytes)}", None))
    return (*found, *_smaller_target(f, w, fits))


def _single(f: Footprint, w: Wishes, fits: Fits) -> Iterator[Change]:
    if w.dtype is not None and fits(f, replace(w, dtype=None)):
        yield Change("keep the target as it is stored", replace(w, dtype=None))
    if (n := largest(w.context, lambda n: fits(f, replace(w, context=n)))) is not None:
        yield Change(f"a context of {n} tokens", replace(w, context=n))
    if users := _bisect(w.users - 1, lambda n: fits(f, replace(w, users=n))):
        yield Change(f"{users} users at once" if users > 1 else "one user", replace(w, users=users))
    if w.cache_dtype != "int8" and fits(f, replace(w, cache_dtype="int8")):
        yield Change("caches in int8", replace(w, cache_dtype="int8"))
    if f.draft is not None and w.head_dtype is None and fits(f, replace(w, head_dtype="int8")):
        yield Change("the draft's weights in int8", replace(w, head_dtype="int8"))
    if not w.mapped and (
        tenths := _bisect(f.largest_file // TENTH, lambda n: fits(replace(f, largest_file=n * TENTH), w))
    ):
        yield Change(f"the checkpoint saved again in files of at most {mb(tenths * TENTH)}", None)


def _smaller_target(f: Footprint, w: Wishes, fits: Fits) -> Iterator[Change]:
    """How many bits a weight of the target may have."""
    elements = sum(part.elements for part in f.parts)
    bits = 8 * sum(part.size(w.dtype) for part in f.parts) / elements

    def scaled(tenths: int) -> Footprint:
        share = tenths / 10 / bits
        parts = tuple(replace(p, bytes=round(p.size(w.dtype) * share)) for p in f.parts)
        return replace(f, parts=parts, largest_file=round(f.largest_file * share))

    best = _bisect(int(bits * 10), lambda tenths: fits(scaled(tenths), replace(w, dtype=None)))
    if best >= 10 * LEAST_BITS:
        size = best / 10 * elements / 8
        yield Change(
            f"the target in at most {best / 10:.1f} bits a weight ({size / 1e9:.1f} GB, of {bits:.1f} bits now), or a"
            " smaller one",
            None,
        )
    else:
        yield Change("a smaller target, or more memory", None)


def largest(context: int, fits: Callable[[int], bool]) -> int | None:
    """The longest context below `context`, in multiples of STEP, that fits."""
    best = _bisect((context - 1) // STEP, lambda n: fits(n * STEP))
    return best * STEP if best else None


def _bisect(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1..most that fits, 0 if none: what is smaller fits too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _combined(context: int, w: Wishes, f: Footprint) -> str:
    words = [f"a context of {context} tokens", "caches in int8"]
    words += ["the draft's weights in int8"] if f.draft else []
    words += ["one user"] if w.users > 1 else []
    return ", ".join(words)


def mb(count: float) -> str:
    """Bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def us(seconds: float) -> str:
    """Seconds in words."""
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.2g} µs"
