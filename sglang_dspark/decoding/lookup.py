"""Prompt look-up: draft what followed the same words last time, without a draft model.

Code, summaries and edits repeat their prompt and themselves. Where the last n tokens occurred before, what came after
them is a guess that costs nothing to make.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_dspark.errors import InputError


class Lookup:
    """The n-grams of a growing text, n = 1..longest, and where each occurred last.

    A token costs `longest` entries in hash maps, however long the text is. An n-gram is entered once a token follows
    it, so that the end of the text never finds itself.
    """

    def __init__(self, longest: int = 4) -> None:
        """Raises InputError unless `longest` is at least 1."""
        if longest < 1:
            raise InputError(f"Prompt look-up needs n-grams of at least 1 token, not {longest}.")
        self.longest = longest
        self.tokens: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            end = len(self.tokens)
            for n, after in enumerate(self._after[:end], start=1):
                after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def clear(self) -> None:
        """Forget the text."""
        self.tokens.clear()
        for after in self._after:
            after.clear()

    def propose(self, count: int) -> tuple[list[int], int]:
        """What may follow the text: `count` tokens, and the length of the n-gram that found them.

        The longest n-gram that occurred before decides, and of its occurrences the last. Where the copy runs into the
        end of the text it goes on with itself, as a repetition would. Nothing and 0 if no n-gram is found.
        """
        end = len(self.tokens)
        for n in range(min(self.longest, end), 0, -1):
            start = self._after[n - 1].get(tuple(self.tokens[end - n :]))
            if start is not None:
                copied = self.tokens[start : start + count]
                while len(copied) < count:
                    copied.append(copied[len(copied) - (end - start)])
                return copied, n
        return [], 0
