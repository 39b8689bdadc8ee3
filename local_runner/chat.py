"""A conversation in the terminal, or line by line on a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable

from local_runner.answer import answer, write_out
from local_runner.engine import Decoding, Engine, Message, Mode, encode
from local_runner.interrupt import cancel_on_interrupt
from local_runner.watchdog import watching
from sglang_dspark.errors import InputError

HELP = "/reset forgets the conversation, /quit ends it; Ctrl-C stops an answer."


def chat(engine: Engine, decoding: Decoding, mode: Mode, system: str | None, say: Callable[[str], None]) -> None:
    """Read what the user says, line by line, and answer with the whole conversation in mind, until /quit or the end.

    Ctrl-C stops the answer, which stays in the conversation as far as it came; at the prompt it ends the program.
    On a terminal what cannot be answered is said and dropped; on a pipe it raises InputError. Raises CheckFailed after
    an answer that was cut short because the host ran short of memory.
    """
    interactive = sys.stdin.isatty()
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if interactive:
        say(HELP)
    while (line := _read(interactive)) is not None:
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(start)
            say("The conversation starts anew.")
        elif text.startswith("/"):
            say(HELP)
        elif text:
            question: Message = {"role": "user", "content": text}
            try:
                reply = _reply(engine, decoding, mode, [*messages, question], say)
            except InputError as error:
                if not interactive:
                    raise
                say(f"{error} /reset starts anew.")
                continue
            messages += [question, {"role": "assistant", "content": reply}]


def _reply(engine: Engine, decoding: Decoding, mode: Mode, messages: list[Message], say: Callable[[str], None]) -> str:
    with cancel_on_interrupt() as cancelled, watching(engine.description, cancelled) as dog:
        reply = answer(engine, decoding, encode(engine, messages), mode, cancelled=cancelled, write=write_out)
    write_out("\n")
    say(reply.statistics())
    dog.raise_trouble()
    return reply.text or ""


def _read(interactive: bool) -> str | None:
    if not interactive:
        return sys.stdin.readline() or None
    try:
        return input("> ")
    except EOFError:
        return None
