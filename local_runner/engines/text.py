"""Tokens as text while they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Turns tokens into text as they come; holds back the bytes of a character that is not complete."""

    CONTEXT = 8
    """Tokens before the new ones that are decoded with them: some tokenizers drop a space at the start of a text."""

    def __init__(self, decode_ids: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode_ids
        self._done: list[int] = []
        self._open: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete."""
        self._open += tokens
        before = self._decode(self._done)
        text = self._decode(self._done + self._open)[len(before) :]
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._done = (self._done + self._open)[-self.CONTEXT :]
        self._open = []
        return text
