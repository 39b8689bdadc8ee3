"""A tally as Prometheus counters beside SGLang's own, in the process that keeps it."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter

from sglang_dspark.serving.tally import BINS, Tally

TOTALS = {
    "rounds": "Rounds of draft and verification.",
    "drafted": "Tokens drafted, whether or not they were verified.",
    "committed": "Tokens committed by rounds, with their corrections and bonuses, before any cut at a stop.",
}
BY_POSITION = {
    "scheduled": "Rounds that verified the draft at this position (1-based); survival is accepted / scheduled.",
    "reached": "Rounds that accepted all before this position; conditional acceptance is accepted / reached.",
    "accepted": "Rounds that accepted the draft at this position.",
}
BY_BIN = {
    "counts": ("confidence_tokens", "Drafts that were reached, by what the confidence head gave them."),
    "predicted": ("confidence_predicted", "Sum of the confidences of those drafts."),
    "survived": ("confidence_accepted", "Those drafts that were accepted."),
}


class Metrics:
    """Counters `dspark:*`, labelled by position in the block, or by bin of confidence, alone."""

    def __init__(self, block: int) -> None:
        self._told = Tally(block)
        self._totals = {n: Counter(f"dspark:{n}", text) for n, text in TOTALS.items()}
        self._positions = {
            n: [Counter_.labels(str(k + 1)) for k in range(block)]
            for n, text in BY_POSITION.items()
            for Counter_ in [Counter(f"dspark:position_{n}", text, ["position"])]
        }
        self._bins = {
            n: [Counter_.labels(f"{i / BINS:.1f}") for i in range(BINS)]
            for n, (name, text) in BY_BIN.items()
            for Counter_ in [Counter(f"dspark:{name}", text, ["bin"])]
        }

    def tell(self, tally: Tally) -> None:
        """Bring the counters up to `tally`."""
        for name, counter in self._totals.items():
            now: Any = getattr(tally, name)
            counter.inc(now - getattr(self._told, name))
            setattr(self._told, name, now)
        for name, counters in (self._positions | self._bins).items():
            now, told = getattr(tally, name).copy(), getattr(self._told, name)
            for counter, value in zip(counters, (now - told).tolist(), strict=True):
                counter.inc(value)
            setattr(self._told, name, now)
