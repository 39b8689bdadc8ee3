"""Lets `import torchvision` succeed where its compiled part cannot load, as beside a CPU build of PyTorch.

torchvision on PyPI is compiled against the CUDA build. Beside the CPU build its operators do not load, and two of its
modules then fail because they register kernels for operators that are not there. SGLang needs only the part written in
Python. scripts/setup_sglang.sh copies this file beside the packages and has a .pth file import it at start; therefore
it imports nothing but the standard library, and looks at PyTorch only when torchvision is asked for.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from types import ModuleType

REGISTRATIONS = ("torchvision._meta_registrations", "torchvision._autograd_registrations")


def built_apart(torch_version: str, torchvision_version: str) -> bool:
    """Whether one of two builds is for the CPU and the other is not, judged by their local versions ("+cpu")."""
    return torch_version.endswith("+cpu") != torchvision_version.endswith("+cpu")


class BeforeTorchvision:
    """A finder that finds nothing: it empties the two modules when torchvision is about to be imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            if built_apart(importlib.metadata.version("torch"), importlib.metadata.version("torchvision")):
                sys.modules.update({module: ModuleType(module) for module in REGISTRATIONS})
        return None


def install() -> None:
    """Put the finder in front of the others."""
    sys.meta_path.insert(0, BeforeTorchvision())
