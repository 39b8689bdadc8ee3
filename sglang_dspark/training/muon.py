"""Muon (Jordan 2024): steps along the nearest orthogonal matrix of the momentum, for the matrices of a head's layers.

PyTorch's own multiplies in bfloat16, which a CPU without such instructions does four times slower than float32; at the
size of a head that is more than half of a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration: the steepest at zero that still keeps singular values near one."""


def orthogonal(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Nearly U·Vᵀ of `matrix` [m, n] = U·S·Vᵀ: singular values come to between about 0.7 and 1.2. In bfloat16 on a GPU,
    in float32 on a CPU.
    """
    a, b, c = QUINTIC
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """For matrices [m, n]. `lr` is the spectral norm of a step, times √(m/n) of tall ones; momentum is Nesterov's."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step along the gradients that there are."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                mean = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(mean, group["momentum"])
                size = group["lr"] * max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(orthogonal(ahead), alpha=-size)
