"""DSPARK on SGLang: the plugin, its hooks and the CPU platform; what it makes of checkpoints and of requests; its
rounds as they happen; and what starts, proves and measures servers.

Modules here import sglang inside functions, or are imported only by a process that runs it.
"""
