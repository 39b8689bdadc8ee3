"""DSPARK on SGLang: the plugin, its hooks, the CPU platform, and what it makes of checkpoints.

Modules here import sglang inside functions, or are imported only by a process that runs it.
"""
