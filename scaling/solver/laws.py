"""Parametric loss laws.

Symbols follow Schwethelm et al. 2026 (arXiv:2604.21106): N_once parameters executed once per token,
N_rec parameters shared by the recurrences (counts), r recurrences, D tokens, L loss in nats per
token. Arrays run over runs, [n].
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Array = FloatArray | float


@dataclass(frozen=True, kw_only=True)
class Chinchilla:
    """L = E + A·N^−α + B·D^−β  (eq. 2; Hoffmann et al. 2022, arXiv:2203.15556).

    E, A, B in nats (A and B carry the units of N^α and D^β); α, β without unit.
    """

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def __post_init__(self) -> None:
        """Refuse parameters that are no law.

        E < 0, or A, B, α, β ≤ 0, or one that is not finite.
        """
        _check(self)

    def loss(self, n: Array, tokens: Array) -> Array:
        """Predicted validation loss, nats per token. [n] → [n].

        >>> law = Chinchilla(E=1.8172, A=482.01, alpha=0.3478, B=2085.43, beta=0.3658)
        >>> round(float(law.loss(70e9, 1.4e12)), 2)
        1.97
        """
        return self.E + self.A * n**-self.alpha + self.B * tokens**-self.beta


@dataclass(frozen=True, kw_only=True)
class JointLaw:
    """L = E + A·(N_once + r^φ·N_rec)^−α + B·D^−β  (eq. 3).

    E, A, B in nats (A and B carry the units of N^α and D^β); α, β, φ without unit. φ = 0 says that
    a recurrence adds nothing, φ = 1 that it is worth a layer with its own weights.
    """

    E: float
    A: float
    alpha: float
    B: float
    beta: float
    phi: float

    def __post_init__(self) -> None:
        """Refuse parameters that are no law.

        E < 0, or A, B, α, β ≤ 0, or one that is not finite.
        """
        _check(self)

    def effective_parameters(self, n_once: Array, n_rec: Array, r: Array) -> Array:
        """Parameters of the unlooped model with the same capacity, N_once + r^φ·N_rec.

        [n] → [n].
        """
        return n_once + r**self.phi * n_rec

    def loss(self, n_once: Array, n_rec: Array, r: Array, tokens: Array) -> Array:
        """Predicted validation loss, nats per token. [n] → [n].

        >>> law = JointLaw(E=1.57, A=28.0, alpha=0.199, B=916.0, beta=0.369, phi=0.46)
        >>> round(float(law.loss(20e6, 20e6, 4, 1e9)), 2)
        2.81
        """
        n_eff = self.effective_parameters(n_once, n_rec, r)
        return self.E + self.A * n_eff**-self.alpha + self.B * tokens**-self.beta


def _check(law: Chinchilla | JointLaw) -> None:
    for field in fields(law):
        value = getattr(law, field.name)
        positive = field.name in ("A", "B", "alpha", "beta")
        if not np.isfinite(value) or (positive and value <= 0) or (field.name == "E" and value < 0):
            rule = "positive and finite" if positive else "finite and at least 0"
            rule = "finite" if field.name == "phi" else rule
            raise ValueError(
                f"{type(law).__name__}: {field.name} is {value}, but must be {rule}. "
                "Check the fit or the numbers that this law was built from."
            )
