"""The tables of a stored bench: costs by mode, and the speed of every way to decode beside plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from local_runner.report import number

BASELINE = "transformers generate"
SHOWN_ROWS = ("1", "2", "4", "6", "8", "12", "16")
Table = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one way to decode: how many tokens after the prompt's step, and their seconds."""

    way: str
    domain: str
    repeat: int
    tokens: int
    seconds: float


def ways_result(answers: Sequence[Answer]) -> dict[str, Any]:
    """For each way its figures by domain and over `all` tokens: tokens per second (tokens over seconds within a
    repeat, then the median), `over_generate` (the same divided by transformers' plain generate, within a repeat) and
    `over_plain` (divided by plain decoding of the same engine; None for what is no engine of ours).
    """
    domains = list(dict.fromkeys(a.domain for a in answers))
    return {
        way: {domain: _figures(answers, way, domain) for domain in [*domains, "all"]}
        for way in sorted({a.way for a in answers})
    }


def _figures(answers: Sequence[Answer], way: str, domain: str) -> dict[str, float | None]:
    of_domain = [a for a in answers if domain in (a.domain, "all")]
    repeats = sorted({a.repeat for a in of_domain})
    mode, comma, engine = way.partition(", ")
    plain = f"plain, {engine}" if mode == "DSpark" and comma else None

    def rate(which: str, repeat: int) -> float | None:
        mine = [a for a in of_domain if (a.way, a.repeat) == (which, repeat)]
        seconds = sum(a.seconds for a in mine)
        return sum(a.tokens for a in mine) / seconds if seconds > 0 else None

    def over(base: str | None) -> float | None:
        if base is None:
            return None
        return _median(lambda n: _ratio(rate(way, n), rate(base, n)), repeats)

    return {
        "tokens_per_s": _median(lambda n: rate(way, n), repeats),
        "over_generate": over(BASELINE),
        "over_plain": over(plain),
    }


def _median(figure: Callable[[int], float | None], repeats: Sequence[int]) -> float | None:
    known = [value for n in repeats if (value := figure(n)) is not None]
    return median(known) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """`steps`, `costs` and `ways` of a result, as `local_runner.report` renders them."""
    return {"steps": _steps(result), "costs": _costs(result), "ways": _ways(result)}


def _steps(result: dict[str, Any]) -> Table:
    modes = result["modes"]
    rows = []
    for k in SHOWN_ROWS:
        row = [k]
        for mode in modes.values():
            seconds = mode["step_s"][k]["median"]
            row.append(f"{seconds * 1e3:.1f} ms ({seconds / mode['step_s']['1']['median']:.2f}×)")
        rows.append(row)
    return {"columns": ["rows", *modes], "rows": rows}


def _costs(result: dict[str, Any]) -> Table:
    modes = result["modes"].values()
    block = next(iter(modes))["block_rows"]
    speed = result["bandwidth"]["bytes_per_s"]

    def line(label: str, cell: Callable[[dict[str, Any]], str]) -> list[str]:
        return [label, *map(cell, modes)]

    rows = [
        line("one row", lambda m: f"{m['step_s']['1']['median'] * 1e3:.1f} ms"),
        line(f"{block} rows / one row", lambda m: number(m["block_over_one_row"], ".2f", "×")),
        line("drafting a block / one row", lambda m: number(m["draft_over_one_row"], ".0%")),
        line("neither target nor draft / a round", lambda m: number(m["shares"]["overhead_share"], ".1%")),
        line(
            f"{block} rows / reading the weights once at {speed / 1e9:.1f} GB/s",
            lambda m: number(m["block_over_weights"], ".2f", "×"),
        ),
    ]
    return {"columns": ["", *result["modes"]], "rows": rows}


def _ways(result: dict[str, Any]) -> Table:
    ways = result["ways"]
    domains = [d for d in next(iter(ways.values())) if d != "all"]
    columns = ["way to decode", *(f"{d}, tok/s" for d in domains), "all, tok/s", f"over {BASELINE}", "over plain"]
    rows = [
        [
            way,
            *(number(by_domain[d]["tokens_per_s"], ".1f") for d in [*domains, "all"]),
            number(by_domain["all"]["over_generate"], ".2f", "×"),
            number(by_domain["all"]["over_plain"], ".2f", "×"),
        ]
        for way, by_domain in ways.items()
    ]
    return {"columns": columns, "rows": rows}
