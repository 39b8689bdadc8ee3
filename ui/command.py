"""The command `dspark demo`. Gradio and PyTorch are imported by what needs them, so that `--help` is quick."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from local_runner.options import Settings, shared
from sglang_dspark.errors import InputError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ui.service import Service

PAGE = "Page"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SWITCH_INTERVAL_S = 0.001
"""How long a thread may keep the interpreter from others; Python's 5 ms are as long as a small model's round."""


@shared(max_new_tokens=128)
def demo(
    settings: Settings,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Decode on this server, SGLang's or dspark serve.",
            rich_help_panel="Sources",
        ),
    ] = None,
    server_plain: Annotated[
        str | None,
        typer.Option(
            "--server-plain",
            metavar="URL",
            help="A server without speculation, for the lane beside it.",
            rich_help_panel="Sources",
        ),
    ] = None,
    server_key: Annotated[
        str | None,
        typer.Option(
            "--server-key",
            metavar="KEY",
            envvar="DSPARK_API_KEY",
            help="The key that the servers ask for.",
            rich_help_panel="Sources",
        ),
    ] = None,
    replay: Annotated[
        list[Path] | None,
        typer.Option(
            "--replay",
            metavar="FILE",
            help="Show a recorded run, which needs no model; given twice, the Rounds of one lane each.",
            rich_help_panel="Sources",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="The address to bind.", rich_help_panel=PAGE)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.", rich_help_panel=PAGE)
    ] = 0,
    auth: Annotated[
        str | None,
        typer.Option(
            "--auth",
            metavar="USER:PASSWORD",
            envvar="DSPARK_AUTH",
            help="Ask visitors for these.",
            rich_help_panel=PAGE,
        ),
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Make a public link, through Gradio's servers.", rich_help_panel=PAGE)
    ] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page on a desktop.", rich_help_panel=PAGE)
    ] = True,
) -> None:
    """Open the page: race plain decoding against DSpark and watch it token by token.

    It is served to this machine alone unless --host or --share says otherwise.
    """
    if auth is not None and not all(auth.partition(":")[::2]):
        raise InputError("--auth needs a user and a password, like --auth ada:secret.")
    if server_plain and not server:
        raise InputError("--server-plain stands beside --server; give that too.")
    if server and replay:
        raise InputError("--server and --replay are both a source of rounds; give one of them.")
    if not (server or replay):
        _check(settings)
    recording = None
    if replay:
        from ui.recording import read

        recording = read(*replay)
    gradio = _needed()
    listening = _bind(host, port)
    from ui.remote import Remote
    from ui.service import Service
    from ui.sources import Local, Recorded

    service = Service(
        Recorded() if recording is not None else Remote(server, server_plain, server_key) if server else Local(settings)
    )
    shown = service.keep(recording, settings).id if recording is not None else None
    local = host in LOOPBACK and not share
    app = gradio(service, settings, replay=shown, remote=server is not None, auth=auth, local=local)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _serve(app, service, listening, auth=auth, share=share, browser=browser)


def _check(settings: Settings) -> None:
    """Raises InputError for what could not be decoded, before there is a page."""
    from local_runner.pairs import load_pair
    from sglang_dspark.decoding.schedule import parse_schedule
    from ui.ask import read_ask

    if settings.pair and settings.target:
        raise InputError("--pair already names a target; give either --pair or --target.")
    if settings.pair:
        load_pair(settings.pair)
    if settings.schedule and settings.schedule != "adaptive":
        parse_schedule(settings.schedule)
    read_ask({"kind": "machine", "temperature": settings.temperature, "top_p": settings.top_p}, settings)


def _needed() -> Callable[..., FastAPI]:
    """`ui.app.application`. Raises InputError where Gradio is not installed."""
    try:
        from ui.app import application
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("gradio", "fastapi", "uvicorn", "starlette"):
            raise
        raise InputError("The page needs Gradio; run pip install 'sglang-dspark[ui]'.") from error
    return application


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InputError if there can be none."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise InputError(
            f"The page cannot be served at {host}, port {port} ({reason}); choose another --host or --port."
        ) from error


def _serve(
    app: FastAPI, service: Service, listening: socket.socket, *, auth: str | None, share: bool, browser: bool
) -> None:
    """Serve until interrupted; say where, and open the browser there."""
    import uvicorn

    host, port = listening.getsockname()[:2]
    everywhere = host in ("0.0.0.0", "::")
    named = "127.0.0.1" if everywhere else f"[{host}]" if ":" in host else host
    url = f"http://{named}:{port}/"
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)

    def ready() -> None:
        while not server.started:
            time.sleep(0.02)
        typer.echo(f"DSpark is at {_shared(named, port) if share else url} (Ctrl-C ends it)")
        if (share or named not in LOOPBACK or everywhere) and auth is None:
            typer.echo("Whoever reaches this address can use it; --auth asks for a password.", err=True)
        if browser and _desktop():
            webbrowser.open(url)

    threading.Thread(target=ready, daemon=True).start()
    try:
        server.run(sockets=[listening])
    finally:
        service.close()


def _shared(host: str, port: int) -> str:
    """A public address that Gradio's servers tunnel to this one."""
    from gradio.networking import setup_tunnel

    return setup_tunnel(host, port, secrets.token_urlsafe(32), None, None)


def _desktop() -> bool:
    """Whether somebody sits before this machine, as far as can be told."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(k) for k in ("DISPLAY", "WAYLAND_DISPLAY"))
