"""How a plan is shown: a table of its parts, a bar for each pool, and what else could be done; or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from local_runner.placement.changes import mb
from local_runner.placement.plan import Placed, Plan, Use
from local_runner.report import markdown

WIDTH = 72
"""Columns of a bar."""
TITLES = {
    "layer": "target layers", "experts": "target experts", "cache": "caches", "embedding": "target embedding",
    "lm_head": "target lm_head",
}  # fmt: skip
COLOURS = {
    "target": "blue", "caches": "cyan", "draft": "magenta", "Markov tables": "yellow", "work spaces": "green",
    "free": "grey50", "kept free": "grey30", "others": "grey37",
}  # fmt: skip
FAMILIES = {"cache": "caches", "work space": "work spaces", "W1": "Markov tables", "W2": "Markov tables"}
DRAFT = ("backbone", "draft experts", "draft embedding", "draft lm_head", "confidence")
MARKS = {"target": "█", "caches": "▓", "draft": "▒", "Markov tables": "▚", "work spaces": "▞", "free": "·",
         "kept free": "×", "others": "-"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """Parts that share kind, pool, type and reason, as one line."""

    part: str
    pool: str
    dtype: str
    bytes: int
    plain_s: float
    round_s: float
    reason: str


def rows(plan: Plan) -> list[Row]:
    """The parts of a plan, layers together."""

    def key(p: Placed) -> tuple[str, str, str, str]:
        return (p.kind, p.pool, p.dtype, p.reason) if p.part[-1].isdigit() else (p.part, p.pool, p.dtype, p.reason)

    order = {k: n for n, k in reversed(list(enumerate(map(key, plan.placed))))}
    together = sorted(plan.placed, key=lambda p: order[key(p)])
    return [_row(list(group)) for _, group in groupby(together, key)]


def _row(parts: Sequence[Placed]) -> Row:
    first = parts[0]
    name = first.part
    if name[-1].isdigit() and len(parts) > 1:
        numbers = sorted(int(p.part.rsplit(" ", 1)[1]) for p in parts)
        name = f"{TITLES.get(first.kind, first.part.rsplit(' ', 1)[0])} {ranges(numbers)}"
    total = (sum(p.bytes for p in parts), sum(p.plain_s for p in parts), sum(p.round_s for p in parts))
    return Row(name, first.pool, first.dtype, *total, first.reason)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 0–3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def shares(plan: Plan, use: Use) -> list[tuple[str, int]]:
    """What fills a pool, in bytes: families of parts, what is free to use, kept free, and taken by others already."""
    sizes = dict.fromkeys(("target", "caches", "draft", "Markov tables", "work spaces"), 0)
    for placed in plan.placed:
        if placed.pool == use.pool:
            family = FAMILIES.get(placed.kind, "draft" if placed.kind in DRAFT else "target")
            sizes[family] += placed.bytes
    rest = {"free": use.budget - use.used, "kept free": min(use.reserve, use.free), "others": use.size - use.free}
    return [(name, size) for name, size in (sizes | rest).items() if size > 0]


def bar(plan: Plan, use: Use, width: int = WIDTH) -> Text:
    """One pool as a bar of `width` columns; everything that is there gets at least one."""
    text = Text()
    found = shares(plan, use)
    edge, done, drawn = 0, 0, 0
    for n, (name, size) in enumerate(found):
        done += size
        edge = max(drawn + 1, min(round(width * done / use.size), width - (len(found) - 1 - n)))
        text.append(MARKS[name] * (edge - drawn), COLOURS[name])
        drawn = edge
    return text


def sentence(plan: Plan) -> str:
    """The outcome in one sentence."""
    f, w = plan.footprint, plan.wishes
    asked = f"{w.context} tokens of context for {w.users} user{'s' if w.users > 1 else ''}"
    if not plan.fits:
        room = sum(use.budget for use in plan.uses)
        return (
            f"{f.name} does not fit on {plan.machine.name} with {asked}: it takes {mb(plan.needed)}, and while loading"
            f" {mb(plan.transient)} more for a file, of {mb(room)} that may be given out."
        )
    said = f"{f.name} fits on {plan.machine.name} with {asked}. A step takes at least {ms(plan.plain_s)}"
    if plan.round_s is None or plan.break_even is None or f.draft is None:
        return f"{said}."
    pays = f"pays from an accepted length of {plan.break_even:.2f} on"
    if plan.break_even >= f.draft.block + 1:
        pays = (
            f"cannot pay: it would have to accept {plan.break_even:.2f} tokens, and makes at most {f.draft.block + 1}"
        )
    return f"{said}, a round that verifies all {f.draft.block} drafts {ms(plan.round_s)}: drafting {pays}."


def view(plan: Plan) -> RenderableType:
    """The whole plan for a terminal."""
    return Group(*_blocks(plan))


def _blocks(plan: Plan) -> Iterator[RenderableType]:
    yield Text(sentence(plan), "bold")
    if plan.fits:
        table = Table("part", "memory", "type", "size", "a step", "a round", "why")
        for column in table.columns[3:6]:
            column.justify = "right"
        for row in rows(plan):
            table.add_row(*(Text(cell) for cell in _cells(row)))
        yield table
    for use in plan.uses:
        speed = f"{use.bandwidth / 1e9:.0f} GB/s"
        yield Text(f"{use.pool}: {mb(use.used)} of {mb(use.budget)} used, {mb(use.size)} in all, {speed}")
        yield bar(plan, use)
    shown = dict.fromkeys(name for use in plan.uses for name, _ in shares(plan, use))
    legend = Text()
    for name in shown:
        legend.append(f"{MARKS[name]} {name}  ", COLOURS[name])
    yield legend
    for title, lines in _lists(plan):
        yield Text(title, "bold")
        for line in lines:
            yield Text(f"  {line}")


def _cells(row: Row) -> tuple[str, ...]:
    times = (ms(row.plain_s) if row.plain_s else "–", ms(row.round_s) if row.round_s else "–")
    return (row.part, row.pool, row.dtype or "–", mb(row.bytes), *times, row.reason)


def _lists(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    if plan.changes:
        yield "What would fit", [change.what for change in plan.changes]
    if plan.rejected:
        yield "Not chosen", [f"{r.what}: {r.why}" for r in plan.rejected]
    if plan.fits and not plan.proven:
        yield "Limits", ["the search was cut short; a quicker placement may exist"]
    if notes := [*plan.machine.notes, *plan.footprint.notes]:
        yield "Notes", notes


def page(plans: Sequence[Plan], command: str) -> str:
    """A stored page: one machine, and each model on it."""
    machine = plans[0].machine
    lines = [f"# {machine.name}\n", *(f"{note}\n" for note in machine.notes), f"Made by `{command}`.\n"]
    pools: list[tuple[str, ...]] = [
        (u.pool, mb(u.size), mb(u.free), mb(u.reserve), f"{u.bandwidth / 1e9:.0f} GB/s", p.source)
        for u, p in zip(plans[0].uses, machine.pools, strict=True)
    ]
    lines.append(markdown(("memory", "size", "free", "kept free", "read at", "by"), pools))
    for plan in plans:
        lines += [f"## {plan.footprint.name}\n", f"{sentence(plan)}\n"]
        if plan.fits:
            head = ("part", "memory", "type", "size", "a step", "a round", "why")
            lines.append(markdown(head, [_cells(row) for row in rows(plan)]))
        for title, items in _lists(plan):
            if title != "Notes":
                lines.append(f"{title}:\n\n" + "".join(f"- {item}\n" for item in items))
        if plan.footprint.notes:
            lines.append(" ".join(plan.footprint.notes) + "\n")
    return "\n".join(lines)


def show(plan: Plan, console: Console) -> None:
    """Write the plan to a terminal, or plainly to a pipe."""
    console.print(view(plan), highlight=False)


def ms(seconds: float) -> str:
    """Seconds in words."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-5 else f"{seconds * 1e6:.2g} µs"
