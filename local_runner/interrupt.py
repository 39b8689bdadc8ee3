"""Ctrl-C as a request to stop between rounds, so that what was decoded is whole and every file is closed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def cancel_on_interrupt() -> Iterator[threading.Event]:
    """Within the block the first Ctrl-C sets the event; a second one, for the impatient, raises KeyboardInterrupt."""
    cancelled = threading.Event()

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt
        cancelled.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield cancelled
    finally:
        signal.signal(signal.SIGINT, before)
