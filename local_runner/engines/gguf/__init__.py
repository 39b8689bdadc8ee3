"""The llama.cpp engine: a GGUF target and a GGUF draft, through the library of llama-cpp-python."""

from local_runner.engines.gguf.engine import LlamaEngine, load_engine

__all__ = ["LlamaEngine", "load_engine"]
