"""Draft checkpoints on disk. `tensors` reads safetensors folders without trusting them; each format has one module
beside it that turns its `config.json` into a `DraftConfig` and says which tensors, of which shapes, belong to that
configuration.
"""
