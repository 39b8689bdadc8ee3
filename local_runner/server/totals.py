"""What a server has done since it started."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang_dspark.decoding.rounds import Round


@dataclass(slots=True)
class Totals:
    """Sums. `rounds` are those after a prefill, `drafting_rounds` those of them that drafted."""

    requests: int = 0
    answered: int = 0
    cancelled: int = 0
    failed: int = 0
    turned_away: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafting_rounds: int = 0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, round_: Round) -> None:
        """Take in a round; of a prefill only its token counts, as in `rounds.summarise`."""
        self.tokens += len(round_.committed)
        if round_.index > 0:
            self.rounds += 1
            self.drafting_rounds += bool(round_.drafted)
            self.drafted += len(round_.drafted)
            self.scheduled += round_.scheduled
            self.accepted += round_.accepted
            self.seconds += round_.draft_s + round_.verify_s

    def to_dict(self) -> dict[str, Any]:
        """The sums and the mean accepted length τ of the rounds that drafted, the bonus token included."""
        mean = self.accepted / self.drafting_rounds + 1 if self.drafting_rounds else None
        return {**asdict(self), "mean_accepted_length": mean}
