"""Equivalent sizes: an unlooped model and a looped one of the same width and effective depth.

Their own parameters N, and N_eff = N_once + r^φ·N_rec, the size of the unlooped model whose loss the
looped one reaches on the same tokens. Source: Schwethelm et al. 2026 (arXiv:2604.21106), appendix
G.5. Symbols: d hidden size, N parameters (count, without embeddings).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..record import Record
from ..runs.kinds import architecture_name
from ..solver.laws import JointLaw
from .frontier import Architecture

GIVEN = ("hidden_size", "n_unlooped", "n", "n_eff")


@dataclass(frozen=True, kw_only=True)
class EquivalentSize(Record):
    """A looped model beside the unlooped one of its width and effective depth.

    n_unlooped: the unlooped model's parameters, None (reason says why) when the table has none of this
    depth. n: the looped model's own. n_eff: its effective ones under the law and the table's split.
    extrapolated: the width lies outside the table's.
    """

    r: int
    effective_depth: float | None
    hidden_size: float
    n_unlooped: float | None
    n: float
    n_eff: float
    extrapolated: bool
    reason: str | None

    @property
    def saved(self) -> float | None:
        """Share of the unlooped model's parameters that the looped one does without."""
        return None if self.n_unlooped is None else 1.0 - self.n / self.n_unlooped

    @property
    def kept(self) -> float | None:
        """N_eff as a share of the unlooped model's parameters."""
        return None if self.n_unlooped is None else self.n_eff / self.n_unlooped


def equivalent_size(
    law: JointLaw,
    found: Sequence[Architecture],
    r: int,
    *,
    hidden_size: float | None = None,
    n_unlooped: float | None = None,
    n: float | None = None,
    n_eff: float | None = None,
    effective_depth: float | None = None,
) -> EquivalentSize:
    """Size of a looped model from exactly one of its width, N, N_eff or its unlooped partner's N.

    `found` are the table's `frontier.architectures`, under the split that the law was fitted with.
    `effective_depth` chooses where the table has several. Raises ValueError when not exactly one
    size is given, it is not positive, or the architecture is not there.
    """
    looped = _chosen(found, r, effective_depth)
    unlooped = _unlooped(found, looped)
    values = dict(zip(GIVEN, (hidden_size, n_unlooped, n, n_eff), strict=True))
    name, value = _given(values)
    if name == "hidden_size":
        width = value
    elif name == "n":
        width = _width(looped.n, value)
    elif name == "n_eff":
        worth = float(r) ** law.phi
        c1, c2 = (a + worth * b for a, b in zip(looped.n_once, looped.n_rec, strict=True))
        width = _width((c1, c2), value)
    elif unlooped is None:
        raise ValueError(
            f"n_unlooped is given, but the table has no unlooped partner of "
            f"{architecture_name(r, looped.effective_depth)}. Add runs at r = 1, or give hidden_size."
        )
    else:
        width = _width(unlooped.n, value)
    return EquivalentSize(
        r=r,
        effective_depth=looped.effective_depth,
        hidden_size=width,
        n_unlooped=None if unlooped is None else float(unlooped.parameters(width)),
        n=float(looped.parameters(width)),
        n_eff=float(looped.effective(law, width)),
        extrapolated=not looped.smallest <= width <= looped.largest,
        reason=None if unlooped else "the table has no unlooped model of this effective depth",
    )


def _given(values: dict[str, float | None]) -> tuple[str, float]:
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) != 1:
        raise ValueError(
            f"{', '.join(given) or 'no size'} given, but exactly one of {', '.join(GIVEN)} fixes the "
            "model. Give one of them."
        )
    name, value = next(iter(given.items()))
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}, but must be positive and finite. Give a count.")
    return name, float(value)


def _chosen(found: Sequence[Architecture], r: int, depth: float | None) -> Architecture:
    matching = [one for one in found if one.r == r and depth in (None, one.effective_depth)]
    if len(matching) != 1:
        names = "; ".join(architecture_name(one.r, one.effective_depth) for one in found)
        raise ValueError(
            f"{architecture_name(r, depth)} names {len(matching)} of the table's architectures "
            f"({names or 'none is a polynomial in the width'}), but must name one. Choose r, and "
            "effective_depth where several share it."
        )
    return matching[0]


def _unlooped(found: Sequence[Architecture], looped: Architecture) -> Architecture | None:
    for one in found:
        if one.r == 1 and one.effective_depth == looped.effective_depth:
            return one
    return None


def _width(coefficients: tuple[float, float], count: float) -> float:
    """Positive d of c1·d + c2·d² = count, written so that c1² ≫ c2·count loses no digits."""
    c1, c2 = coefficients
    return float(2.0 * count / (c1 + np.sqrt(c1**2 + 4.0 * c2 * count)))
