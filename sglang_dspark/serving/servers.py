"""SGLang servers on this machine's loopback, for as long as something is compared."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from sglang_dspark.errors import InputError

START_S, STOP_S = 1800, 30


class Server:
    """A server in processes of its own, with its log in `folder`. Raises InputError if it does not start."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, name: str) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def wait(self) -> None:
        """Return once it answers."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise InputError(f"The {self.name} server ended with {self._process.returncode}: {self._last()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/model_info", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        raise InputError(f"The {self.name} server did not start within {START_S} seconds; see {self.log}.")

    def _last(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line]
        return f"{(told or lines or ['it said nothing'])[-1].strip()[:300]} ({self.log})"

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        # What it started shares its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
