"""Where each part of a pair should live on a machine: pure arithmetic over sizes, how often they are read, and speeds.

`place` fills the pools with what `items` lists so that a round (a step, without a draft) reads as quickly as can be,
within what `plan.reserve` leaves. The filling is exact unless the plan says that it is not proven; see `packing`.
PyTorch is not imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from local_runner.footprint import Footprint
from local_runner.machine import Machine, Pool
from local_runner.placement.changes import rejected, smallest_changes
from local_runner.placement.items import Item, Piece, Wishes, cache_bytes, items, work_spaces
from local_runner.placement.packing import Packing, pack
from local_runner.placement.plan import Placed, Plan, Use, budget, reserve, thresholds

__all__ = ["Plan", "Wishes", "place"]


@dataclass(frozen=True, slots=True)
class _Filling:
    """A filling of `pools`; `spaces` are in the first of them."""

    pools: tuple[Pool, ...]
    spaces: list[Piece]
    packing: Packing


def place(machine: Machine, footprint: Footprint, wishes: Wishes, *, explain: bool = True) -> Plan:
    """The quickest placement within the budgets of the machine's pools, or what would have to change.

    With `explain` the alternatives that were rejected, or the changes that would make it fit, are worked out too.
    """
    found = items(footprint, wishes)
    filling = _best(machine, footprint, wishes, found)
    plan = _plan(machine, footprint, wishes, found, filling)
    if not explain:
        return plan

    def fits(other: Footprint, changed: Wishes) -> bool:
        return _best(machine, other, changed, items(other, changed), any_will_do=True) is not None

    return replace(plan, rejected=rejected(plan), changes=() if plan.fits else smallest_changes(plan, fits))


def _best(
    machine: Machine, f: Footprint, w: Wishes, found: Sequence[Item], *, any_will_do: bool = False
) -> _Filling | None:
    """The cheapest filling of all pools, or of some: work spaces may not fit in a small fast one. The host's is needed
    in any case, because files are read through it.
    """
    best: _Filling | None = None
    for pools in _subsets(machine):
        spaces = work_spaces(f, w, pools[0].device)
        pinned = _pinned(pools, f.transient(w.mapped), found, sum(space.bytes for space in spaces))
        budgets = [budget(pool) - size for pool, size in zip(pools, pinned, strict=True)]
        if min(budgets) < 0:
            continue
        traffic = [(i.size, i.round if f.draft else i.plain) for i in found]
        packing = pack(traffic, budgets, [pool.bandwidth for pool in pools], any_will_do=any_will_do)
        if packing is not None and (best is None or packing.cost < best.packing.cost):
            best = _Filling(pools, spaces, packing)
    return best


def _subsets(machine: Machine) -> Iterator[tuple[Pool, ...]]:
    """The pools that could be used together, all of them first."""
    for count in range(len(machine.pools), 0, -1):
        yield from (pools for pools in combinations(machine.pools, count) if machine.host in pools)


def _pinned(pools: Sequence[Pool], transient: int, found: Sequence[Item], spaces: int) -> list[int]:
    """Bytes of each pool that are not free to fill: work spaces in the first, and where files are read room for that.

    Work spaces and caches are made after loading, so in a pool that holds everything they use that room again.
    """
    sizes = [spaces if index == 0 else 0 for index in range(len(pools))]
    later = cache_bytes(found) if len(pools) == 1 else 0
    return [
        size + (max(0, transient - size - later) if pool.kind != "gpu" else 0)
        for pool, size in zip(pools, sizes, strict=True)
    ]


def _plan(machine: Machine, f: Footprint, w: Wishes, found: Sequence[Item], filling: _Filling | None) -> Plan:
    placed: list[Placed] = []
    if filling is not None:
        for item, index in zip(found, filling.packing.pools, strict=True):
            placed += _placed(item, filling.pools, index, f, filling)
        placed += [
            Placed(s.name, s.kind, filling.pools[0].name, s.dtype, s.bytes, 0.0, 0.0, "where the forward computes")
            for s in filling.spaces
        ]
    spaces = work_spaces(f, w, machine.pools[0].device)
    uses = [
        Use(
            pool.name,
            pool.kind,
            pool.size,
            pool.free,
            reserve(pool),
            budget(pool),
            sum(p.bytes for p in placed if p.pool == pool.name),
            pool.bandwidth,
        )
        for pool in machine.pools
    ]
    size, spare = sum(i.size for i in found), cache_bytes(found)
    needed = size + sum(s.bytes for s in spaces)
    return Plan(
        machine=machine,
        footprint=f,
        wishes=w,
        fits=filling is not None,
        needed=needed,
        peak=max(needed, size - spare + f.transient(w.mapped)),
        placed=tuple(placed),
        uses=tuple(uses),
        loading="map" if w.mapped else "read and drop",
        transient=f.transient(w.mapped),
        plain_s=sum(p.plain_s for p in placed),
        round_s=sum(p.round_s for p in placed) if f.draft and placed else None,
        proven=filling is None or filling.packing.proven,
        thresholds=thresholds(machine),
    )


def _placed(item: Item, pools: Sequence[Pool], index: int, f: Footprint, filling: _Filling) -> list[Placed]:
    """The pieces of an item; what reading it costs is counted with the first of them."""
    pool = pools[index]
    why = _why(item, f)
    if len(pools) > 1:
        slower = any(p.bandwidth > pool.bandwidth for p in pools)
        why += "; the faster memory saves more time with other parts" if slower else "; in the fastest memory"
    return [
        Placed(
            piece.name,
            piece.kind,
            pool.name,
            piece.dtype,
            piece.bytes,
            item.plain / pool.bandwidth if n == 0 else 0.0,
            item.round / pool.bandwidth if n == 0 else 0.0,
            why if n == 0 else "with its layers",
        )
        for n, piece in enumerate(item.pieces)
    ]


def _why(item: Item, f: Footprint) -> str:
    kind, gamma = item.pieces[0].kind, f.draft.block if f.draft else 0
    if kind == "W2":
        return f"read {gamma} times a round"
    if kind in ("W1", "draft embedding"):
        return f"{gamma} rows are looked up a round"
    if kind == "embedding" and not f.tied:
        return "rows are looked up"
    if kind == "unused":
        return "not read for text"
    if kind in ("experts", "draft experts"):
        share, turn = (item.round, "round") if f.draft else (item.plain, "step")
        return f"{share / item.size:.0%} of them are read a {turn}"
    if kind in ("lm_head", "embedding"):
        return "read twice a round, by target and draft" if item.round > item.plain else "read once"
    return "read once"
