"""One drafter of two sources, a head and prompt look-up, of which a `Chooser` takes one each round, or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from local_runner.engines.base import Choose, Draft, Drafter
from local_runner.engines.loop import PREFILL_CHUNK
from sglang_dspark.decoding.adaptive import Chooser, Source
from sglang_dspark.decoding.lookup import Lookup


@dataclass(slots=True)
class Tally:
    """What the rounds of one source came to."""

    rounds: int = 0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0


class Follower:
    """A head that takes in the target's features late: many rows at once cost little more than one does.

    Rows wait until a block is drafted, or until there are `PREFILL_CHUNK` of them. Where features cannot be kept, they
    are taken in at once.
    """

    def __init__(self, head: Drafter) -> None:
        self.head = head
        self._give = _giver(head)
        self._rows: list[torch.Tensor] = []

    def reset(self) -> None:
        """Forget the context."""
        self._rows.clear()
        self.head.reset()

    def observe(self, count: int) -> None:
        """Keep the features of the first `count` tokens of the target's last forward."""
        if self._give is None:
            self.head.observe(count)
            return
        target: Any = self.head
        self._rows.append(target.target.features(count).clone())
        if sum(map(len, self._rows)) >= PREFILL_CHUNK:
            self.catch_up()

    def catch_up(self) -> None:
        """Take in what waits."""
        if self._rows and self._give is not None:
            self._give(torch.cat(self._rows))
            self._rows.clear()

    def draft(self, anchor: int, position: int, choose: Choose | None) -> Draft:
        """Catch up, and propose a block."""
        self.catch_up()
        return self.head.draft(anchor, position, choose)


def _giver(head: Any) -> Callable[[torch.Tensor], None] | None:
    """How to hand kept features to `head`; None if it only reads its target's last ones."""
    if hasattr(head, "commit") and hasattr(head, "model"):
        give: Callable[[torch.Tensor], None] = head.commit
        return give
    if hasattr(head, "commit"):
        # llama.cpp's draft wants to know the tokens too.
        return lambda rows: head.commit(
            rows.numpy(), head.target.tokens[len(head.tokens) : len(head.tokens) + len(rows)]
        )
    return None


class Mixed:
    """A `Drafter`, and the `Schedule` of what it drafts, as its `chooser` says.

    Which source drafts is settled before a block is drawn, by rounds that are over and by the text, so that no draft is
    kept or dropped for what it says.
    """

    uses_confidence = False

    def __init__(self, chooser: Chooser, head: Drafter | None, block: int, lookup: Lookup | None) -> None:
        """`block` is γ of both sources."""
        self.chooser, self._block, self._lookup = chooser, block, lookup
        self._head = None if head is None else Follower(head)
        self.tallies: dict[Source, Tally] = {"plain": Tally(), "head": Tally(), "lookup": Tally()}
        self._leave: Callable[[], None] = lambda: None
        self.begin((), room=0, lookup=False, following=False)

    def begin(
        self,
        prompt: Sequence[int],
        *,
        room: int,
        lookup: bool,
        following: bool,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """A request begins, in a context of `room` tokens. Says whether look-up may draft and whether the head follows;
        `leave` is called where it no longer has to.
        """
        self._prompt, self._room, self._looking = prompt, room, lookup and self._lookup is not None
        self._following, self._leave = following and self._head is not None, leave
        self._drafted: list[int] | None = None
        self._found: list[int] = []
        self._matches: Sequence[int] = ()
        self._source: Source = "plain"
        self._position = self._scheduled = self._accepted = 0

    @property
    def block(self) -> int:
        """γ."""
        return self._block

    def reset(self) -> None:
        """Start on the text of the request."""
        if self._looking and self._lookup is not None:
            self._lookup.clear()
            self._lookup.extend(self._prompt)
        if self._following and self._head is not None:
            self._head.reset()

    def observe(self, count: int) -> None:
        """Take in the first `count` tokens of the target's last forward: a piece of the prompt, or a round's."""
        if self._following and self._head is not None:
            self._head.observe(count)
        if self._drafted is None:
            return
        self._accepted = count - 1
        self.chooser.observe(self._scheduled, self._accepted)
        tally = self.tallies[self._source]
        tally.rounds += 1
        tally.drafted += len(self._drafted)
        tally.scheduled += self._scheduled
        tally.accepted += self._accepted

    def draft(self, anchor: int, position: int, choose: Choose | None = None) -> Draft:
        """Propose a block after the anchor, or nothing."""
        self._read([*(self._drafted or ())[: self._accepted], anchor])
        self._source, self._position, self._scheduled = self.chooser.choose(self._matches), position, 0
        if self._following and not self.chooser.following:
            self._following = False
            self._leave()
        block = Draft([])
        if self._source == "head" and self._head is not None:
            block = self._head.draft(anchor, position, choose)
        elif self._source == "lookup":
            block = Draft(list(self._found))
        self._drafted = block.tokens
        return block

    def length(self, confidence: Sequence[float], drafted: int) -> int:
        """As `Schedule.length`."""
        if drafted:
            self._scheduled = min(self.chooser.length(confidence, drafted), self._room - self._position - 1)
        return self._scheduled

    def _read(self, tokens: list[int]) -> None:
        """Take in the tokens that the last round committed, judge what look-up thought of them, and look up again."""
        if not self._looking or self._lookup is None:
            return
        if self._matches:
            # A guess is judged by what the target said, whoever drafted; what lies behind that nobody knows.
            pairs = zip(self._found, tokens, strict=False)
            right = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(self._found), len(tokens)))
            self.chooser.compared(self._matches[: len(tokens)], right)
        self._lookup.extend(tokens)
        self._found, length = self._lookup.propose(self._block)
        self._matches = range(length, length + len(self._found))
