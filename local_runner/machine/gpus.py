"""Graphics processors, through NVML (package nvidia-ml-py, if it is there) or through PyTorch.

On GB10, the chip of DGX Spark, NVML has no memory figures, and `cudaMemGetInfo` counts the page cache as used although
the kernel would give it up: there, and on any other integrated processor, the host's MemAvailable is what is free.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

INTEGRATED = ("GB10", "Orin", "Thor", "Xavier")
"""What the names of NVIDIA's integrated processors contain."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One graphics processor. `size` and `free` are bytes of its own memory, None where it does not tell."""

    name: str
    index: int
    size: int | None
    free: int | None
    integrated: bool


def gpus(nvml: Any = None, cuda: Any = None) -> list[Gpu]:
    """Those that are here. `nvml` stands for the module pynvml, `cuda` for torch.cuda; by default what is installed."""
    nvml = nvml if nvml is not None else _module("pynvml")
    found = _from_nvml(nvml) if nvml is not None else []
    return found or _from_cuda(cuda)


def _from_nvml(nvml: Any) -> list[Gpu]:
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [_of_handle(nvml, i, handle) for i, handle in enumerate(handles)]
    except nvml.NVMLError:
        return []  # no driver: no device that could be used


def _of_handle(nvml: Any, index: int, handle: Any) -> Gpu:
    name = nvml.nvmlDeviceGetName(handle)
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        size, free = int(memory.total), int(memory.free)
    except nvml.NVMLError:
        return Gpu(name, index, None, None, True)
    return Gpu(name, index, size or None, free if size else None, not size or _is_integrated(name))


def _from_cuda(cuda: Any) -> list[Gpu]:
    if cuda is None:
        torch = _module("torch")
        cuda = torch.cuda if torch is not None else None
    if cuda is None or not cuda.is_available():
        return []
    found = []
    for index in range(cuda.device_count()):
        properties = cuda.get_device_properties(index)
        free, size = cuda.mem_get_info(index)
        integrated = bool(getattr(properties, "is_integrated", False)) or _is_integrated(properties.name)
        found.append(Gpu(properties.name, index, int(size), int(free), integrated))
    return found


def _is_integrated(name: str) -> bool:
    return any(part in name for part in INTEGRATED)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
