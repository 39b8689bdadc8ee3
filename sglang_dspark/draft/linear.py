"""Matrix products with a few rows, laid out for the device: the bulk of every pass of a draft and of a target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cpu_multiplies_bfloat16() -> bool:
    """Whether PyTorch has bfloat16 products for this CPU; builds without oneDNN have not."""
    known = hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    return known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packs(weight: Tensor) -> bool:
    """Whether oneDNN has a layout of its own for `weight`, in which few rows cost little more than reading it once."""
    return weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and cpu_multiplies_bfloat16()


class Linear(nn.Module):
    """x [..., in] -> x Wᵀ + b [..., out], with the weight in the layout that is fastest to read.

    The plain matrix is `weight` until the first product, which lays it out anew where that pays and lets go of the
    plain one, so that it is in memory once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight: Tensor | None = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self._packed is None:
            assert self.weight is not None, "a matrix is plain or packed"
            if not packs(self.weight):
                return F.linear(x, self.weight, self.bias)
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous())
            self.weight = None
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product
