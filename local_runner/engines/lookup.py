"""Decoding with prompt look-up: a `Drafter` without a model, and the engine that drafts with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from local_runner.engines.base import Choose, Draft, Request
from local_runner.engines.torch.engine import TorchEngine
from sglang_dspark.decoding.lookup import Lookup
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError

BLOCK = 7


class LookupDrafter:
    """Drafts by `Lookup`, and says how sure it is by how often drafts as well matched were right so far.

    A token drafted k-th by an n-gram is found by n + k - 1 tokens that match once those before it are accepted. Its
    confidence is the share of such tokens that the target agreed with, in all requests of this drafter, beginning at
    1 of 2. It rests on earlier rounds alone, so scheduling by it stays lossless.
    """

    def __init__(self, block: int = BLOCK, longest: int = 4) -> None:
        """`block` is γ; `longest` is the longest n-gram."""
        self._block = block
        self._lookup = Lookup(longest)
        self._coming: list[int] = []
        """The tokens that the target reads next and that are not in the text yet."""
        self._drafted: list[int] = []
        self._ahead = self._match = self._accepted = 0
        self._tried, self._right = [2] * (longest + block), [1] * (longest + block)

    @property
    def block(self) -> int:
        """γ; a block may be shorter."""
        return self._block

    def begin(self, prompt: tuple[int, ...]) -> None:
        """The next request's prompt: the one thing that a drafter is not told otherwise."""
        self._coming = list(prompt)

    def reset(self) -> None:
        """Forget the text, but not what was learnt about matches."""
        self._lookup.clear()
        self._drafted, self._ahead = [], 0

    def observe(self, count: int) -> None:
        """Take in the first `count` tokens of the target's last forward."""
        self._accepted = count - self._ahead
        self._lookup.extend(self._coming[: self._accepted])
        del self._coming[: self._accepted]
        self._ahead = 0

    def draft(self, anchor: int, position: int, choose: Choose | None = None) -> Draft:
        """Propose up to γ tokens after the anchor, or none; `choose` has no logits to choose from."""
        self._learn(anchor)
        self._lookup.extend([anchor])
        self._ahead = 1  # the target has yet to read the anchor, which the text already ends in
        self._drafted, self._match = self._lookup.propose(self._block)
        self._coming = list(self._drafted)
        at = range(self._match, self._match + len(self._drafted))
        return Draft(list(self._drafted), [self._right[m] / self._tried[m] for m in at])

    def _learn(self, anchor: int) -> None:
        """Score the last block, now that the target's own token after what it accepted is known.

        A token that was accepted was right. So was one that was not sent to verification, if it is the anchor.
        """
        for k, token in enumerate([*self._drafted[: self._accepted], anchor][: len(self._drafted)]):
            self._tried[self._match + k] += 1
            self._right[self._match + k] += token == self._drafted[k]


class LookupEngine(TorchEngine):
    """A target that drafts for itself by prompt look-up."""

    def __init__(self, engine: TorchEngine, block: int = BLOCK) -> None:
        """`engine` is a target without a draft; its target is shared."""
        description = engine.description | {"draft": "prompt look-up"}
        super().__init__(engine.target, None, engine.tokenizer, engine.stop_ids, description)
        self.lookup = LookupDrafter(block)
        self.drafter = self.lookup

    @property
    def block(self) -> int:
        """γ."""
        return self.lookup.block

    @property
    def has_confidence(self) -> bool:
        """It judges its tokens by those before them."""
        return True

    def generate(self, request: Request, cancelled: threading.Event | None = None) -> Iterator[Round]:
        """Decode one request. Raises InputError for drafts that should be drawn from a distribution: there is none."""
        if request.draft_style == "sampled" and not request.sampling.greedy:
            raise InputError("Prompt look-up has no distribution to draw drafts from; use --draft-style greedy.")
        self.lookup.begin(request.prompt_ids)
        yield from super().generate(request, cancelled)
