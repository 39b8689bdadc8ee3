"""Engines run a target and a drafter on this machine. `base` is the seam, `loop` the decoding loop that all engines
share.
"""
