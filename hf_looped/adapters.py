# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Per-recurrence low-rank adapters on shared matrices: Bae et al. 2024, arXiv:2410.20672.

Shapes: R trained recurrences, K rank, D input size, F output size.
"""

import torch
from torch import nn

from .cpu_ops import Linear


class AdaptedLinear(Linear):
    """x·Wᵀ + (x·A(t)ᵀ)·B(t)ᵀ / K at recurrence t, A [R, K, D] and B [R, F, K] of each recurrence's own.

    B is initially 0, so that all recurrences begin with the shared matrix.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, recurrences: int):
        super().__init__(in_features, out_features, bias=False)
        self.adapter_down = nn.Parameter(torch.empty(recurrences, rank, in_features))
        self.adapter_up = nn.Parameter(torch.empty(recurrences, out_features, rank))

    def forward(self, x: torch.Tensor, recurrence: int = 0) -> torch.Tensor:
        """Multiply at recurrence t, [..., D] → [..., F]."""
        down, up = self.adapter_down[recurrence], self.adapter_up[recurrence]
        low = nn.functional.linear(x, down.to(x.dtype))
        return super().forward(x) + nn.functional.linear(low, up.to(x.dtype)) / down.shape[0]


def project(matrix: nn.Module, x: torch.Tensor, recurrence: int) -> torch.Tensor:
    """Multiply by a matrix of a block, adapted to the recurrence where it has adapters."""
    return matrix(x, recurrence) if isinstance(matrix, AdaptedLinear) else matrix(x)
