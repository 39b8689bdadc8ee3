"""Items into pools at the least cost, exactly: branch and bound over groups of equal items.

An item of `size` bytes of which `traffic` bytes are read a round costs traffic / rate in a pool that is read at `rate`.
If items could be cut, filling the fastest pool first with what is read most often for its size would be best (moving
either of two items that are the other way round costs more), which is a lower bound for whole ones. Branches that
cannot be below the best known cost by that bound are cut; the first branch tried is the greedy filling itself, which
mostly meets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LIMIT = 50_000
"""Branches after which the best filling so far is returned, as not proven."""
EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class Packing:
    """The pool of each item, the cost in seconds, what no filling could be below, and whether none is cheaper."""

    pools: tuple[int, ...]
    cost: float
    bound: float
    proven: bool


@dataclass(slots=True)
class _Group:
    """`items` that are equal in size and traffic."""

    size: int
    traffic: float
    items: list[int]


@dataclass(slots=True)
class _Search:
    groups: list[_Group]
    rates: Sequence[float]
    enough: float
    best: float = float("inf")
    chosen: list[tuple[int, ...]] | None = None
    branches: int = 0
    path: list[tuple[int, ...]] = field(default_factory=list)

    def bound(self, first: int, room: Sequence[int]) -> float:
        """The least cost of the groups from `first` on, were they divisible; infinite if they exceed all room."""
        left = list(room)
        cost, pool = 0.0, 0
        for group in self.groups[first:]:
            need = group.size * len(group.items)
            if need == 0:
                cost += group.traffic * len(group.items) / self.rates[0]
                continue
            remaining = need
            while remaining > 0:
                while pool < len(left) and left[pool] == 0:
                    pool += 1
                if pool == len(left):
                    return float("inf")
                part = min(remaining, left[pool])
                cost += group.traffic * len(group.items) * (part / need) / self.rates[pool]
                left[pool] -= part
                remaining -= part
        return cost

    def run(self, first: int, room: tuple[int, ...], cost: float) -> None:
        """Try every division of the groups from `first` on that may beat the best known."""
        if first == len(self.groups):
            self.best, self.chosen = cost, list(self.path)
            return
        group = self.groups[first]
        for counts in _divisions(len(group.items), group.size, room):
            self.branches += 1
            if self.branches > LIMIT or (self.chosen is not None and self.best <= self.enough):
                return
            rest = tuple(r - group.size * n for r, n in zip(room, counts, strict=True))
            spent = cost + sum(group.traffic * n / rate for n, rate in zip(counts, self.rates, strict=True))
            if spent + self.bound(first + 1, rest) < self.best * (1 - EPSILON):
                self.path.append(counts)
                self.run(first + 1, rest, spent)
                self.path.pop()


def pack(
    items: Sequence[tuple[int, float]], budgets: Sequence[int], rates: Sequence[float], *, any_will_do: bool = False
) -> Packing | None:
    """The cheapest filling of pools of `budgets` bytes, read at `rates` bytes per second and listed fastest first, with
    `items` of (size, traffic) bytes; None where none was found. The same input gives the same filling. `any_will_do`
    returns the first filling, which answers whether there is one.
    """
    together: dict[tuple[int, float], list[int]] = {}
    for index, item in enumerate(items):
        together.setdefault(item, []).append(index)
    groups = [_Group(size, traffic, found) for (size, traffic), found in together.items()]
    groups.sort(key=lambda g: (-(g.traffic / g.size if g.size else float("inf")), -g.size))
    room = tuple(max(0, b) for b in budgets)
    least = _Search(groups, rates, 0.0).bound(0, room)
    search = _Search(groups, rates, float("inf") if any_will_do else least * (1 + EPSILON))
    search.run(0, room, 0.0)
    if search.chosen is None:
        return None
    pools = [0] * len(items)
    for group, counts in zip(groups, search.chosen, strict=True):
        spread = [pool for pool, n in enumerate(counts) for _ in range(n)]
        for index, pool in zip(group.items, spread, strict=True):
            pools[index] = pool
    return Packing(tuple(pools), search.best, least, search.branches <= LIMIT)


def _divisions(count: int, size: int, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to put `count` items of `size` into pools with that room, the most into the first pools first."""
    most = count if size == 0 else min(count, room[0] // size)
    if len(room) == 1:
        if most == count:
            yield (count,)
        return
    for here in range(most, -1, -1):
        for others in _divisions(count - here, size, room[1:]):
            yield (here, *others)
