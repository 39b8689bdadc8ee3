"""Matrix products with a few rows, laid out for the device: the bulk of every pass of a draft and of a target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def packs(weight: Tensor) -> bool:
    """Whether oneDNN has a layout of its own for `weight`, in which few rows cost little more than reading it once."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear(nn.Module):
    """x [..., in] -> x Wᵀ + b [..., out]; the weight is kept in the layout that is fastest to read.

    The weight that was passed is not kept where the layout is another, so that it is in memory once.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = packs(weight)
        layout = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight
        # Not a buffer where packed: a tensor in oneDNN's layout cannot be moved or saved.
        if self.packed:
            self.weight = layout
        else:
            self.register_buffer("weight", layout, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)
