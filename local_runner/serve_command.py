"""The command `dspark serve`: one engine behind an OpenAI-compatible interface, on this machine unless told."""

from __future__ import annotations

import ipaddress
import signal
import socket
from dataclasses import replace
from types import FrameType
from typing import Annotated

import typer

from local_runner.engine import Mode
from local_runner.options import Settings, open_engine, shared
from sglang_dspark.errors import InputError

SERVER = "Server"
MOST_CONNECTIONS = 256
LEAVE_S = 15
"""How long open answers may take to end when the server stops."""


@shared(max_new_tokens=1024)
def serve(
    settings: Settings,
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode without the draft, unless asked.", rich_help_panel="Drafting")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="The address to bind.", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.", rich_help_panel=SERVER)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", envvar="DSPARK_API_KEY", help="Ask clients for it.", rich_help_panel=SERVER
        ),
    ] = None,
    no_auth: Annotated[
        bool,
        typer.Option("--no-auth", help="Serve other machines too without asking for a key.", rich_help_panel=SERVER),
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="Let pages of this origin ask; may be repeated.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    queue: Annotated[
        int, typer.Option("--queue", min=0, help="How many requests may wait.", rich_help_panel=SERVER)
    ] = 64,
) -> None:
    """Serve the pair to OpenAI clients: chat and text completions, streamed or whole.

    What a request leaves out is as the options here say. /dspark/rounds streams every Round. Ctrl-C ends the running
    answer at its next round.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise InputError(
            "dspark serve needs Starlette and uvicorn; run: pip install 'sglang-dspark[serve]'."
        ) from error
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise InputError("--api-key must be letters, digits and marks without a space around them; give another key.")
    listener, local = bind(host, port)
    with listener:
        if not local and api_key is None and not no_auth:
            raise InputError(
                f"{host} can be reached from other machines; add --api-key KEY, or --no-auth if that is meant."
            )
        from local_runner.server.app import make_app
        from local_runner.server.jobs import Jobs
        from local_runner.server.protocol import Served

        decoding = settings.decoding(suited=True)
        # A seed that nobody gave must not be the same for all requests.
        decoding = replace(decoding, sampling=replace(decoding.sampling, seed=settings.seed))
        engine, name = open_engine(settings, say, suited=not plain, reuse_prefix=True)
        mode: Mode = "dspark" if engine.block and not plain else "plain"
        decoding = decoding.measured(engine) if mode == "dspark" else decoding
        with Jobs(Served(engine, name, decoding, mode), most_waiting=queue) as jobs:
            hosts = frozenset({host, "localhost", "127.0.0.1", "::1"}) if local else None
            app = make_app(jobs, api_key=api_key, origins=allow_origin or (), hosts=hosts)
            config = uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=LEAVE_S,
            )

            class Server(uvicorn.Server):
                """Ends what runs when it is told to stop, and leaves the exit code to us."""

                interrupted = False

                def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                    self.force_exit = self.should_exit
                    self.should_exit = True
                    self.interrupted |= sig == signal.SIGINT

                async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                    await super().startup(sockets)
                    say(f"Serving {name} at http://{_address(listener)}/v1 (Ctrl-C stops)")

                async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                    jobs.stop()
                    await super().shutdown(sockets)

            server = Server(config)
            server.run(sockets=[listener])
    if server.interrupted:
        raise typer.Exit(130)


def bind(host: str, port: int) -> tuple[socket.socket, bool]:
    """A socket bound there that does not listen yet, and whether only this machine reaches it.

    Raises InputError if there is no such address or it is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InputError(f"{host} is no address of this machine ({error}); give another --host.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise InputError(
            f"{host} port {port} cannot be bound ({error.strerror}); give another --host or --port."
        ) from error
    return listener, ipaddress.ip_address(str(listener.getsockname()[0]).split("%")[0]).is_loopback


def say(text: str) -> None:
    """One line on standard error."""
    typer.echo(text, err=True)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
