"""The commands `dspark prove` and `dspark load`: running SGLang servers compared, for their answers and their speed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from local_runner.files import whole_file
from local_runner.launch_command import of_pair
from sglang_dspark.errors import CheckFailed, InputError

if TYPE_CHECKING:
    from sglang_dspark.serving.client import Client
    from sglang_dspark.serving.prove import Proof

Key = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", envvar="DSPARK_API_KEY", help="What the servers ask for.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result here too.")]


def prove(
    context: typer.Context,
    url: Annotated[str | None, typer.Argument(help="A running server with DSPARK.")] = None,
    plain: Annotated[
        str | None, typer.Option("--plain", metavar="URL", help="A running server of the same model without it.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="Start both servers here for this target …")] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="… and this draft.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=8, help="The length of greedy answers.")] = 64,
    samples: Annotated[int, typer.Option("--samples", min=100, help="Sampled answers by setting and server.")] = 500,
    api_key: Key = None,
    as_json: Json = None,
) -> None:
    """Show that a server with DSPARK answers as a plain one does: the same greedy tokens, the same distribution.

    Either give the URLs of both, or --target and --draft, and SGLang's own options for both (--device cpu, …). Exit
    code 0 means proved, 1 that something differed. Compare with a plain server of --disable-overlap-schedule where
    penalties matter: with it SGLang counts them late.
    """
    from sglang_dspark.serving.client import Client
    from sglang_dspark.serving.prove import prove as compare
    from sglang_dspark.serving.stress import requests

    console = Console(stderr=True)
    with ExitStack() as stack:
        if url is not None:
            if plain is None or target is not None or context.args:
                raise InputError("Give --plain URL with the URL of the server with DSPARK, and no more; or --target.")
            urls = (plain, url)
        else:
            if target is None:
                raise InputError("Give the URL of a server with DSPARK and --plain URL, or --target and --draft.")
            urls = stack.enter_context(_both(target, draft, context.args, console))
        a, b = (Client(u, api_key) for u in urls)
        for server, wanted in ((a, False), (b, True)):
            if server.speculates() is not wanted:
                raise InputError(f"{server.url} {'does not use' if wanted else 'uses'} DSPARK; give another server.")
        proof = compare(a, b, _possible([a, b], requests(b, tokens), console), samples, console.print)
    _show(proof, Console())
    if as_json is not None:
        with whole_file(as_json) as stream:
            json.dump(proof.to_dict() | {"servers": urls}, stream, indent=1)
    if not proof.proved:
        raise CheckFailed("The server with DSPARK does not answer as the plain one does; see above.")


@contextmanager
def _both(target: str, draft: str | None, more: list[str], console: Console) -> Iterator[tuple[str, str]]:
    """A plain server and one with DSPARK, of the same checkpoint and options, started here and ended afterwards."""
    from sglang_dspark.serving import launch, plugin
    from sglang_dspark.serving.servers import Server

    launch.check_sglang()
    chosen, head = of_pair(target, draft)
    found = launch.prepare(chosen, head, launch.Recipe(), more)
    command = list(found.command)
    plain = [*command[:5], *_without_speculation(command[5:]), "--disable-overlap-schedule"]
    own = {plugin.CHOSEN: plugin.PLATFORM} if plugin.option(more, "--device") == "cpu" else {}
    # What is logged is left where it is said to be if a server fails.
    folder = Path(tempfile.mkdtemp(prefix="dspark-prove-"))
    console.print(f"starting two servers, logs in {folder}")
    with Server(plain, own, folder, "plain") as a, Server(command, {}, folder, "DSPARK") as b:
        a.wait()
        b.wait()
        yield a.url, b.url


def _without_speculation(words: list[str]) -> list[str]:
    from sglang_dspark.serving.launch import without

    for name in {w.partition("=")[0] for w in words if w.startswith("--speculative-")}:
        words = without(words, name)
    return words


def _possible(servers: list[Client], asks: list[Any], console: Console) -> list[Any]:
    """Without requests for a grammar, if the servers have no backend for one."""
    grammars = [a for a in asks if "json_schema" in a.sampling]
    try:
        for server in servers:
            for asked in grammars:
                server.ask(asked)
    except InputError as error:
        console.print(f"grammars are left out: {error}")
        return [a for a in asks if a not in grammars]
    return asks


def _show(proof: Proof, console: Console) -> None:
    kinds = ", ".join(f"{n} × {kind}" for kind, n in proof.requests.items())
    console.print(f"greedy: {kinds}; {proof.tokens} tokens, one at a time and many at once")
    console.print(
        f"noise, plain against plain: {proof.noise:.2g}; {proof.plain_differences} answers differ when batched"
    )
    for d in proof.differences:
        where = f"{d.kind}, request {d.request}{', batched' if d.batched else ''}, token {d.position}"
        console.print(f"  parts at {where}: lead {d.margin:.2g}, {'numerics' if d.numerics else 'NOT numerics'}")
    if not proof.differences:
        console.print("  identical")
    for f in proof.fits:
        named = ", ".join(f"{k} {v:g}" for k, v in f.sampling.items())
        stray = f", {f.strays} outside the distribution" if f.strays else ""
        console.print(f"sampled with {named}: χ² on {f.freedom} degrees, p {f.dspark:.3f} (plain {f.plain:.3f}){stray}")
    console.print("proved" if proof.proved else "NOT proved")


def load(
    servers: Annotated[list[str], typer.Argument(metavar="NAME=URL…", help="Running servers; the first is plain.")],
    users: Annotated[str, typer.Option("--users", help="Numbers of users at once.")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="The length of an answer.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Interleaved; medians are shown.")] = 3,
    api_key: Key = None,
    as_json: Json = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it into an SVG file.")] = None,
) -> None:
    """Measure running SGLang servers under one user, and under many: for each, for all, and where speculation stops
    paying.
    """
    from local_runner.prompts import read_prompts
    from sglang_dspark.serving.client import Client
    from sglang_dspark.serving.load import sweep, turning_point

    named = dict(s.split("=", 1) for s in servers if "=" in s)
    if len(named) != len(servers):
        raise InputError(
            "Give each server once, as NAME=URL: plain=http://127.0.0.1:30000 dspark=http://127.0.0.1:30001."
        )
    try:
        counts = sorted({int(n) for n in users.split(",")})
        if counts[0] < 1:
            raise ValueError
    except ValueError as error:
        raise InputError(f"--users {users} must be whole numbers from 1 on, with commas between.") from error
    prompts = Client(next(iter(named.values())), api_key).tokenise([p.turns[0] for p in read_prompts() if p.turns])
    points = sweep(named, prompts, counts, tokens, repeats, Console(stderr=True).print, api_key)
    table = Table("server", "users", "tok/s", "tok/s a user", "TTFT, ms", "TPOT, ms", "τ")
    for p in sorted(points, key=lambda p: (p.users, list(named).index(p.server))):
        τ = "–" if p.mean_accepted_length is None else f"{p.mean_accepted_length:.2f}"
        times = (f"{1000 * p.ttft_s:.0f}", f"{1000 * p.tpot_s:.1f}")
        table.add_row(p.server, str(p.users), f"{p.tokens_per_s:.1f}", f"{p.tokens_per_s_user:.1f}", *times, τ)
    Console().print(table)
    first, *others = named
    turns = {name: turning_point(points, first, name) for name in others}
    for name, turn in turns.items():
        typer.echo(
            f"{name} gives fewer tokens than {first} from {turn} users on." if turn else f"{name} never falls behind."
        )
    if as_json is not None:
        with whole_file(as_json) as stream:
            found = {"servers": named, "cores": os.cpu_count(), "tokens": tokens, "repeats": repeats, "turns": turns}
            json.dump(found | {"points": [asdict(p) for p in points]}, stream, indent=1)
    if plot is not None:
        from local_runner.plots import line_chart, page

        lines = {n: [(float(p.users), p.tokens_per_s) for p in points if p.server == n] for n in named}
        own = {n: [(float(p.users), p.tokens_per_s_user) for p in points if p.server == n] for n in named}
        with whole_file(plot) as stream:
            stream.write(
                page(
                    [
                        line_chart("All users", lines, "users", "tokens/s"),
                        line_chart("One user", own, "users", "tokens/s"),
                    ]
                )
            )
