"""A plan: where every part of a pair would live on a machine, why, what a step would take, and what was rejected."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from local_runner.footprint import Footprint
from local_runner.machine import Machine, Pool
from local_runner.placement.items import Wishes

RESERVES = {"gpu": (0.04, 512 << 20), "system": (0.08, 256 << 20), "unified": (0.10, 2 << 30)}
"""Share of a pool, and the least of it in bytes, that stays free. Where processor and graphics share memory, over-
commit can hang the host instead of raising an error, so more does."""
SWAP_GROWTH = 256 << 20
PRESSURE_FULL, PRESSURE_SOME = 10.0, 40.0
"""Per cent of ten seconds."""


def reserve(pool: Pool) -> int:
    """Bytes of a pool that no plan gives out."""
    share, least = RESERVES[pool.kind]
    return max(least, round(pool.size * share))


def budget(pool: Pool) -> int:
    """Bytes of a pool that a plan may give out."""
    return max(0, pool.free - reserve(pool))


@dataclass(frozen=True, slots=True)
class Placed:
    """One part and its pool; `plain_s` and `round_s` are the seconds that reading it adds to a step and a round."""

    part: str
    kind: str
    pool: str
    dtype: str
    bytes: int
    plain_s: float
    round_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Use:
    """One pool: what it has, what a plan may give out (`budget`), what it does (`used`), and what stays (`reserve`)."""

    pool: str
    kind: str
    size: int
    free: int
    reserve: int
    budget: int
    used: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """An alternative, and why it is not taken."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change of wishes with which the pair fits; `wishes` is None where another target or no draft is needed."""

    what: str
    wishes: Wishes | None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a run is stopped: `available` bytes left on the host, per cent of memory pressure, bytes of swap growth."""

    available: int
    pressure_some: float = PRESSURE_SOME
    pressure_full: float = PRESSURE_FULL
    swap_growth: int = SWAP_GROWTH


def thresholds(machine: Machine) -> Thresholds:
    """Half of what stays free on the host: gone only if something else grows, or the plan was wrong."""
    return Thresholds(reserve(machine.host) // 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What `place` found. Without a fit, `placed` is empty and `changes` say what would fit.

    `plain_s` and `round_s` are the least seconds that reading takes, for one step and one round with full contexts;
    arithmetic comes on top where it is slower than memory. `needed` bytes are there while decoding, and `peak` at most,
    loading included. `break_even` is the mean accepted length at which a round
    gives as many tokens a second as steps do. `proven` says that no cheaper placement exists.
    """

    machine: Machine
    footprint: Footprint
    wishes: Wishes
    fits: bool
    needed: int
    peak: int
    placed: tuple[Placed, ...]
    uses: tuple[Use, ...]
    loading: Literal["read and drop", "map"]
    transient: int
    plain_s: float
    round_s: float | None
    proven: bool
    thresholds: Thresholds
    rejected: tuple[Rejected, ...] = ()
    changes: tuple[Change, ...] = ()

    @property
    def break_even(self) -> float | None:
        """Round over step, or None without a draft."""
        return None if self.round_s is None or not self.plain_s else self.round_s / self.plain_s

    @property
    def verify_rows(self) -> int:
        """Rows of the widest verification: all drafts of all sequences that are decoded together."""
        return self.wishes.active * (self.footprint.draft.block + 1 if self.footprint.draft else 1)

    def pool_of(self, part: str) -> str:
        """The pool of a part by its name. Raises KeyError for a part that is not placed."""
        return {placed.part: placed.pool for placed in self.placed}[part]

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        draft = self.footprint.draft
        return {
            "machine": self.machine.name,
            "target": self.footprint.name,
            "draft": draft.name if draft else None,
            "block": draft.block if draft else None,
            "wishes": asdict(self.wishes),
            "fits": self.fits,
            "needed_bytes": self.needed,
            "peak_bytes": self.peak,
            "pools": [asdict(use) for use in self.uses],
            "parts": [asdict(placed) for placed in self.placed],
            "loading": self.loading,
            "transient_bytes": self.transient,
            "step_s": self.plain_s if self.fits else None,
            "round_s": self.round_s if self.fits else None,
            "break_even_accepted_length": self.break_even if self.fits else None,
            "verify_rows": self.verify_rows,
            "max_rows": self.machine.max_rows,
            "proven_optimal": self.proven,
            "rejected": [asdict(r) for r in self.rejected],
            "changes": [{"what": c.what, "wishes": asdict(c.wishes) if c.wishes else None} for c in self.changes],
            "thresholds": asdict(self.thresholds),
            "notes": [*self.machine.notes, *self.footprint.notes],
        }
