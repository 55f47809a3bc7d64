# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Training objectives over several recurrences: exits weighted by a learned distribution, and shorter trajectories.

Shapes: B rows, T tokens, D hidden size, V vocabulary, r recurrences.
"""

from collections.abc import Iterable

import torch
from torch import nn

from .chunked_loss import IGNORED


def exit_log_probabilities(gates: torch.Tensor) -> torch.Tensor:
    """Log of the probability to stop after each of r recurrences, [B, T, r], given the gates' logits, [B, T, r].

    p(t) = λ(t)·Π_{s<t} (1 − λ(s)), λ = σ(gate); the last takes what is left, whatever its gate says
    (Ouro, arXiv:2510.25741).
    """
    stay = nn.functional.logsigmoid(-gates[..., :-1]).cumsum(dim=-1)  # log Π (1 − λ)
    before = nn.functional.pad(stay, (1, 0))
    stop = nn.functional.pad(nn.functional.logsigmoid(gates[..., :-1]), (0, 1))
    return before + stop


def exit_loss(
    logits: Iterable[torch.Tensor],
    log_p: torch.Tensor,
    targets: torch.Tensor,
    entropy_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of Σ_t p(t)·L(t) − β·H(p), nats, and the last logits (Ouro, arXiv:2510.25741, eq. 4).

    logits: of each recurrence, r times [B, T, V]; log_p: [B, T, r]; targets: [B, T], −100 is not scored;
    entropy_weight: β.
    """
    scored, total = targets != IGNORED, log_p.new_zeros(())
    for t, one in enumerate(logits):
        losses = nn.functional.cross_entropy(
            one.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
        ).view(targets.shape)
        p = log_p[..., t].exp()
        minus_entropy = p * log_p[..., t]  # of this exit
        total = total + (p * losses + entropy_weight * minus_entropy)[scored].sum()
    return total, one


def squared_distance(
    short: torch.Tensor, full: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Sum over scored tokens of the mean squared distance per channel of short from full, [B, T, D], which stays.

    The consistency of LoopFormer (arXiv:2602.11451): the shorter trajectory learns from the longer one.
    """
    squares = (short.float() - full.detach().float()).square().mean(dim=-1)
    return squares[targets != IGNORED].sum()
