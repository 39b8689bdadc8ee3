"""DSpark speculative decoding: the draft model, its checkpoints, and the lossless decoding loop's pure parts."""

__version__ = "0.1.0"
