"""Measure, then choose: what a round costs here, what computes quickest, and what each round should draft.

`profile` measures and remembers what rounds cost, `choose` picks the engine, precision and threads, `drafter` mixes a
head with prompt look-up, and `runner` is the engine that does as `sglang_dspark.decoding.adaptive` says.
"""

from local_runner.runner.choose import Models, Way, load_way, open_runner
from local_runner.runner.runner import Runner

__all__ = ["Models", "Runner", "Way", "load_way", "open_runner"]
