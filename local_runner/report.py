"""Tables of the README, made from stored results: `python -m local_runner.report README.md [--check]`.

A table lives between `<!-- table:NAME path/to/result.json -->` and `<!-- /table -->`; the path is relative to the file
it is in. `race` is the result of `dspark race --json`; any other NAME is looked up in the result's own `tables`, as
`{"columns": […], "rows": [[…], …]}`. With --check nothing is written, and the exit code is 1 if a table is stale.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from local_runner.files import whole_file
from sglang_dspark.errors import CheckFailed, InputError

BLOCK = re.compile(r"(<!-- table:(?P<name>\S+) (?P<path>\S+) -->\n)(?P<body>.*?)(<!-- /table -->)", re.DOTALL)
MARKER = re.compile(r"<!-- table:\S+ |<!-- /table -->")

RACE_COLUMNS = ("domain", "plain tok/s", "DSpark tok/s", "speed-up", "τ", "accepted")


def race_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a race's table under RACE_COLUMNS: a line a domain, their mean, and all tokens together."""
    everything = {
        "plain_tokens_per_s": result["plain"]["tokens_per_s"],
        "dspark_tokens_per_s": result["dspark"]["tokens_per_s"],
        "speedup": result["speedup"],
        "mean_accepted_length": result["dspark"]["mean_accepted_length"],
        "draft_acceptance_rate": result["draft_acceptance_rate"],
    }
    named = {**result["domains"], "mean of domains": result["macro_mean"], "all tokens": everything}
    if len(result["domains"]) == 1:
        del named["mean of domains"]
    return [
        (
            name,
            number(row["plain_tokens_per_s"], ".1f"),
            number(row["dspark_tokens_per_s"], ".1f"),
            number(row["speedup"], ".2f", "×"),
            number(row["mean_accepted_length"], ".2f"),
            number(row["draft_acceptance_rate"], ".0%"),
        )
        for name, row in named.items()
    ]


def conditions(result: dict[str, Any]) -> str:
    """One sentence on what was raced and where: pair, precision, threads, machine, sizes."""
    engine, machine = result["engine"], result["machine"]
    repeats = result["repeats"]
    how = ", ".join(str(engine[k]) for k in ("engine", "dtype", "device") if k in engine)
    threads = f", {engine['threads']} threads" if engine.get("threads") else ""
    return (
        f"{result['pair']} ({how}{threads}) on {machine['processor']}, {machine['cores']} cores:"
        f" {result['prompts']} prompts of at most {result['max_new_tokens']} tokens,"
        f" {'one run each' if repeats == 1 else f'medians of {repeats} repeats'}, schedule {result['schedule']}."
    )


def number(value: float | None, form: str, unit: str = "") -> str:
    """A figure as text, or a dash where there is none."""
    return "–" if value is None else f"{value:{form}}{unit}"


def table(name: str, result: dict[str, Any]) -> str:
    """The Markdown of the table `name` of a stored result. Raises InputError if the result has no such table."""
    try:
        if name == "race":
            body = markdown(RACE_COLUMNS, race_rows(result))
            return f"{body}\n{conditions(result)} {result['identity']['sentence']}\n"
        stored = result["tables"][name]
        return markdown(stored["columns"], stored["rows"])
    except (KeyError, TypeError) as error:
        raise InputError(f"The result has no table '{name}' (it lacks {error}); store it again.") from error


def markdown(columns: tuple[str, ...] | list[str], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    lines = [columns, ("---", *("---:" for _ in columns[1:])), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def refresh(path: Path) -> str:
    """The text of `path` with every table made anew. Raises InputError that names a block or file that is wrong."""
    text = _read(path)
    if len(MARKER.findall(text)) != 2 * len(BLOCK.findall(text)):
        raise InputError(
            f"{path} has a table marker without its partner; write both markers, each on a line of its own."
        )

    def replace(match: re.Match[str]) -> str:
        source = path.parent / match["path"]
        try:
            result = json.loads(_read(source))
        except json.JSONDecodeError as error:
            raise InputError(f"{source} is not JSON ({error.msg}); store the result again.") from error
        return f"{match[1]}{table(match['name'], result)}{match[5]}"

    return BLOCK.sub(replace, text)


def check(path: Path) -> None:
    """Raise CheckFailed if a table in `path` is not what its stored result says."""
    if refresh(path) != _read(path):
        raise CheckFailed(f"A table in {path} is stale; run python -m local_runner.report {path}.")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); name an existing text file.") from error


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    paths = [Path(a) for a in arguments if a != "--check"]
    if not paths or any(a.startswith("-") and a != "--check" for a in arguments):
        print("Usage: python -m local_runner.report FILE.md ... [--check]", file=sys.stderr)
        return 2
    try:
        for path in paths:
            if "--check" in arguments:
                check(path)
            else:
                fresh = refresh(path)
                with whole_file(path) as stream:
                    stream.write(fresh)
    except (InputError, CheckFailed) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckFailed) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
