"""Decoding tasks, and the result as one JSON object.

Each task's figures pool its rounds (see `sglang_dspark.training.statistics`). The figures at the top are the mean of
the tasks, each counting the same, however long its answers are.
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, Literal

from local_runner.engine import Decoding, Engine, Message, Mode, encode
from local_runner.plots import bar_chart, line_chart, page, reliability_diagram
from local_runner.prompts import Prompt
from local_runner.report import number
from local_runner.result import machine
from local_runner.tasks import Task
from sglang_dspark.decoding.rounds import Round, summarise
from sglang_dspark.errors import InputError
from sglang_dspark.training.statistics import interval, statistics

Algorithm = Literal["dspark", "lookup", "none"]
TITLES: dict[Algorithm, str] = {"dspark": "DSpark", "lookup": "prompt look-up", "none": "plain decoding"}
MEANS = ("mean_accepted_length", "draft_acceptance_rate", "tokens_per_s")
COLUMNS = ("task", "prompts", "tokens", "τ", "95 %", "accepted", "AUC", "ECE", "tok/s")


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation that was decoded: the rounds of all its turns. `left_out` turns no longer fitted the context."""

    task: str
    prompt: Prompt
    rounds: tuple[Round, ...]
    left_out: int = 0


def check_fit(engine: Engine, tasks: Sequence[Task]) -> None:
    """Raise InputError unless the target can read text, or that names the first prompt too long for its context."""
    if engine.tokenizer is None:
        raise InputError("The target has no tokenizer, so it cannot read text; put its tokenizer into its folder.")
    room = engine.description.get("context_length")
    for task in tasks:
        for prompt in task.prompts:
            length = len(encode(engine, [{"role": "user", "content": prompt.turns[0]}]))
            if room and length >= room:
                raise InputError(
                    f"Prompt {prompt.id} of the task {task.name} has {length} tokens, which leaves no room in a context"
                    f" of {room}; raise --context-length, or take it out."
                )


def decode_tasks(
    engine: Engine,
    tasks: Sequence[Task],
    decoding: Decoding,
    mode: Mode,
    *,
    say: Callable[[str], None],
    cancelled: threading.Event,
) -> list[Talk]:
    """Decode every conversation, later turns after the target's own answers; `say` gets a line for each.

    When `cancelled` is set the decoding ends, and the conversation in which it does is left out.
    """
    talks: list[Talk] = []
    for task in tasks:
        for done, prompt in enumerate(task.prompts, start=1):
            talk = converse(engine, prompt, decoding, mode, f"{task.name}/{prompt.id}", cancelled)
            if cancelled.is_set():
                return talks
            talks.append(Talk(task.name, prompt, *talk))
            made = summarise([r for t in talks if t.task == task.name for r in t.rounds])
            say(
                f"[{done}/{len(task.prompts)}] {task.name}: τ {number(made.mean_accepted_length, '.2f')},"
                f" {made.tokens} tokens, {made.tokens_per_s:.1f} tok/s"
            )
    return talks


def converse(
    engine: Engine, prompt: Prompt, decoding: Decoding, mode: Mode, name: str, cancelled: threading.Event
) -> tuple[tuple[Round, ...], int]:
    """The rounds of all turns of one conversation, and how many turns were left out because it had filled the context.

    Raises InputError if not even the first one fits.
    """
    messages: list[Message] = []
    rounds: list[Round] = []
    for turn, text in enumerate(prompt.turns):
        messages.append({"role": "user", "content": text})
        ids = encode(engine, messages)
        room = engine.description.get("context_length")
        if turn and room and len(ids) >= room:
            return tuple(rounds), len(prompt.turns) - turn
        answer = list(engine.generate(decoding.request(engine, ids, mode, f"{name}#{turn + 1}"), cancelled))
        rounds += answer
        if cancelled.is_set():
            break
        messages.append({"role": "assistant", "content": engine.decode([t for r in answer for t in r.committed])})
    return tuple(rounds), 0


def evaluation(
    engine: Engine, pair: str, algorithm: Algorithm, talks: Sequence[Talk], decoding: Decoding
) -> dict[str, Any]:
    """The result of decoded `talks`: rates in tokens per second, shares from 0 to 1, `_95` a bootstrap interval.

    `domains` holds those that lines name, each over all tasks.
    """
    by_task = _groups(talks, lambda talk: talk.task)
    by_domain = _groups([t for t in talks if t.prompt.domain], lambda talk: talk.prompt.domain)
    tasks = {name: statistics([t.rounds for t in of], engine.block) for name, of in by_task.items()}
    result: dict[str, Any] = {
        "pair": pair,
        "algorithm": algorithm,
        "engine": dict(engine.description),
        "machine": machine(),
        **{name: _mean([task[name] for task in tasks.values()]) for name in MEANS},
        "mean_accepted_length_95": interval([[t.rounds for t in of] for of in by_task.values()]),
        "tasks": tasks,
        "domains": {name: statistics([t.rounds for t in of], engine.block) for name, of in by_domain.items()},
        "turns_left_out": sum(t.left_out for t in talks),
        "block": engine.block,
        "max_new_tokens": decoding.max_new_tokens,
        "sampling": asdict(decoding.sampling),
        "schedule": None if algorithm == "none" else str(decoding.schedule),
        "draft_style": decoding.draft_style,
        "command": shlex.join(["dspark", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return result | {"tables": {"evaluate": {"columns": COLUMNS, "rows": rows(result)}}}


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows under COLUMNS: a line a task, their mean, and a line a domain."""
    groups = {**result["tasks"], **({"mean of tasks": result} if len(result["tasks"]) > 1 else {}), **result["domains"]}
    return [
        (
            name,
            *(str(group.get(key, "")) for key in ("prompts", "tokens")),
            number(group["mean_accepted_length"], ".2f"),
            "–".join(f"{end:.2f}" for end in group["mean_accepted_length_95"] or ()) or "–",
            number(group["draft_acceptance_rate"], ".0%"),
            number((group.get("confidence") or {}).get("auc"), ".3f"),
            number((group.get("confidence") or {}).get("ece"), ".1%"),
            number(group["tokens_per_s"], ".1f"),
        )
        for name, group in groups.items()
    ]


def picture(result: dict[str, Any]) -> str:
    """τ by task, conditional acceptance by position, survival, and the reliability of confidences, as one SVG."""
    tasks: dict[str, Any] = result["tasks"]
    charts = [
        bar_chart(
            f"Mean accepted length, {TITLES[result['algorithm']]}",
            {name: task["mean_accepted_length"] for name, task in tasks.items()},
            "τ: tokens a round, bonus included",
            {name: task["mean_accepted_length_95"] for name, task in tasks.items()},
        )
    ]
    if result["block"] and result["algorithm"] != "none":
        for key, title in (("conditional", "Conditional acceptance"), ("survival", "Survival")):
            series = {name: list(enumerate(task[key], start=1)) for name, task in tasks.items()}
            charts.append(line_chart(title, series, "position in the block", "share accepted", (0.0, 1.0)))
    sure = {name: task["confidence"]["reliability"] for name, task in tasks.items() if task["confidence"]}
    if sure:
        bins = {name: (r["predicted"], r["observed"], r["counts"]) for name, r in sure.items()}
        charts.append(reliability_diagram("Reliability of confidence", bins))
    return page(charts)


def _groups(talks: Sequence[Talk], key: Callable[[Talk], str]) -> dict[str, list[Talk]]:
    found: dict[str, list[Talk]] = {}
    for talk in talks:
        found.setdefault(key(talk), []).append(talk)
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None
