"""The PyTorch engine: a transformers target, a DSpark draft, on CPU, CUDA or MPS."""

from local_runner.engines.torch.engine import TorchEngine, load_engine

__all__ = ["TorchEngine", "load_engine"]
