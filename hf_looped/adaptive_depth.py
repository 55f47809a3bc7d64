# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Adaptive depth at inference: which tokens go through another recurrence, and what those that stopped leave behind.

Shapes: B rows, T new tokens, S cached + new tokens, G key/value heads, C head size. R rows have tokens that are still
active, at most A of them each.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class AdaptiveDepth:
    """When to stop before the last recurrence: as soon as a measure falls below `threshold`, which is 0 for never.

    criterion: "gate", the probability that the exit gate leaves for later recurrences (Ouro, arXiv:2510.25741);
    "change", ‖h(t+1) − h(t)‖ / ‖h(t+1)‖ of the state that the coda reads; "kl", KL(p(t+1) ‖ p(t)) of successive
    predictions, in nats, for which the coda and the LM head run after each recurrence (Geiping et al. 2025,
    arXiv:2502.05171). per: "token", each for itself, or "sequence", all of a row's new tokens together, by the
    measure's mean. The cap is the call's `num_recurrences`. A token that stops leaves its last keys and values in the
    cache slots that it skips.

    used: recurrences of each token, one tensor [B, T] for each call of the model, in the order of the calls.

    Raises ValueError for an unknown criterion or unit, or a threshold out of range (gate: [0, 1); others: [0, ∞)).

    >>> depth = AdaptiveDepth(criterion="change", threshold=0.05)
    """

    criterion: Literal["gate", "change", "kl"]
    threshold: float
    per: Literal["token", "sequence"] = "token"
    used: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, known in (
            ("criterion", ("gate", "change", "kl")),
            ("per", ("token", "sequence")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: use one of {', '.join(known)}."
                )
        most = 1.0 if self.criterion == "gate" else math.inf
        if not 0 <= self.threshold < most:
            raise ValueError(
                f"threshold is {self.threshold}: with criterion={self.criterion!r} it must lie in [0, "
                f"{most:g}); 0 never stops early."
            )

    def stops(self, measure: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """Which of the tokens stop, [R, A], given their measure, and which are padding. Padding stops at once."""
        if self.per == "sequence":
            weight = torch.ones_like(measure) if padding is None else (~padding).to(measure.dtype)
            mean = (measure * weight).sum(1) / weight.sum(1).clamp(min=1)
            measure = mean[:, None].expand_as(measure)
        stop = measure < self.threshold
        return stop if padding is None or self.threshold == 0 else stop | padding


class ActiveTokens:
    """The tokens that another recurrence computes, as indices into [B, T], and keys and values of all.

    Rows with fewer active tokens than others repeat their first one, whose results are then written twice.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device):
        self._going = torch.ones(shape, dtype=torch.bool, device=device)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: torch.Tensor | None = None  # None: all tokens, nothing to gather
        self._columns: torch.Tensor | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._rows is None or len(self._rows) > 0

    def stop(self, stopped: torch.Tensor) -> None:
        """Take out those of the active tokens for which `stopped`, [R, A], holds."""
        if not stopped.any():
            return
        if self._rows is None:
            self._going &= ~stopped
        else:
            self._going[self._rows[:, None], self._columns] &= ~stopped
        self._rows = self._going.any(dim=1).nonzero()[:, 0]
        going = self._going[self._rows]
        counts = going.sum(dim=1)
        most = int(counts.max()) if len(counts) else 0
        columns = going.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        beyond = torch.arange(most, device=going.device) >= counts[:, None]
        self._columns = torch.where(beyond, columns[:, :1], columns)

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """[…, B, T, D] → […, R, A, D]."""
        if self._rows is None:
            return x
        return x[..., self._rows[:, None], self._columns, :]

    def put(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Replace the active tokens of x, […, B, T, D], by part, […, R, A, D]."""
        if self._rows is None:
            return part
        x = x.clone()
        x[..., self._rows[:, None], self._columns, :] = part
        return x

    def complete(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, G, A, C] of the active tokens with the last ones of the others, [B, G, T, C] each."""
        if self._rows is not None:
            rows = self._rows[:, None]
            whole = [tensor.transpose(1, 2).clone() for tensor in self._kept[layer]]  # [B, T, G, C]
            for tensor, part in zip(whole, (key, value), strict=True):
                tensor[rows, self._columns] = part.transpose(1, 2)
            key, value = (tensor.transpose(1, 2) for tensor in whole)
        self._kept[layer] = key, value
        return key, value

    def kept(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Last keys and values of all tokens, [B, G, T, C] each."""
        return self._kept[layer]

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[B, …] → [R, …]."""
        return x if self._rows is None else x[self._rows]

    def inputs(
        self,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        seen: int,
        length: int,
    ) -> dict:
        """Attention mask, positions and rotations of the active tokens alone.

        seen: cached tokens; length: S, with the room that a cache of fixed length leaves.
        """
        if self._rows is None:
            return {
                "attention_mask": mask,
                "position_ids": position_ids,
                "position_embeddings": position_embeddings,
            }
        rows, tokens = self._going.shape
        cos, sin = (
            self.select(part.expand(rows, -1, -1)).contiguous() for part in position_embeddings
        )
        assert self._columns is not None
        if mask is not None:  # [B or 1, 1, T, S]
            mask = mask.expand(rows, -1, -1, -1)[self._rows[:, None], :, self._columns]
            mask = mask.transpose(1, 2)  # [R, 1, A, S]
        elif tokens > 1:
            keys = torch.arange(length, device=cos.device)
            mask = (keys <= seen + self._columns[..., None])[:, None]
        return {
            "attention_mask": mask,
            "position_ids": self.select(position_ids.expand(rows, -1)[..., None])[..., 0],
            "position_embeddings": (cos, sin),
        }


def relative_change(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Compute ‖new − old‖ / ‖new‖ over channels, [..., D] → [...], in float32."""
    new, old = new.float(), old.float()
    tiny = torch.finfo(torch.float32).tiny
    return (new - old).norm(dim=-1) / new.norm(dim=-1).clamp(min=tiny)


def divergence(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """KL(new ‖ old) in nats of log-probabilities [..., V] → [...]."""
    return (new.exp() * (new - old)).sum(dim=-1).clamp(min=0)
