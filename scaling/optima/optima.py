"""Compute-optimal widths under many laws at once, where every resample has a law of its own.

L(x) = E + A·N_eff(d)^−α + B·(C/F(d))^−β with x = log d is lowest where the two terms change at
the same rate, α·A·N_eff^−α·(log N_eff)′ = β·B·D^−β·(log F)′. The left side falls and the right side
grows with x: the root is found by bisection, for all laws together. Symbols: C budget in FLOPs, F
training FLOPs per token, D tokens. Shapes: one entry per law, [R].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..solver.laws import FloatArray, JointLaw
from .frontier import WIDEN, Architecture, polynomial

_HALVINGS = 60  # of a range of log 4096: to the last bits of a double


@dataclass(frozen=True, kw_only=True, eq=False)
class Laws:
    """Several joint laws, every parameter [R]."""

    E: FloatArray
    A: FloatArray
    alpha: FloatArray
    B: FloatArray
    beta: FloatArray
    phi: FloatArray

    @classmethod
    def of(cls, laws: Sequence[JointLaw]) -> "Laws":
        """Stack laws in their order."""
        names = ("E", "A", "alpha", "B", "beta", "phi")
        return cls(**{name: np.array([getattr(law, name) for law in laws]) for name in names})

    def effective(self, one: Architecture, width: FloatArray) -> FloatArray:
        """N_eff of an architecture at every law's width [R] → [R]."""
        _, n_once, n_rec = one.at(width)
        return np.asarray(n_once + one.r**self.phi * n_rec, dtype=float)

    def loss(self, one: Architecture, width: FloatArray, tokens: FloatArray) -> FloatArray:
        """Predicted loss at every law's width and tokens [R], nats per token → [R]."""
        term = self.A * self.effective(one, width) ** -self.alpha
        return np.asarray(self.E + term + self.B * tokens**-self.beta, dtype=float)


@dataclass(frozen=True, kw_only=True, eq=False)
class Optima:
    """The compute-optimal model under every law: width, training FLOPs (budget), tokens, loss, [R].

    NaN where the optimum lies outside the searched widths.
    """

    width: FloatArray
    budget: FloatArray
    tokens: FloatArray
    loss: FloatArray


def optima_at_budget(
    laws: Laws, one: Architecture, flops: tuple[float, float], budget: float
) -> Optima:
    """Lowest loss at budget C for models of the architecture `one` that cost `flops` per token.

    `flops` are coefficients of (d, d²), another architecture's where a question asks for it.
    """

    def excess(x: FloatArray) -> FloatArray:
        needed = _optimal_token_term(laws, one, flops, x)
        tokens = budget / polynomial(flops, np.exp(x))
        return np.asarray(np.log(needed) - np.log(laws.B) + laws.beta * np.log(tokens), dtype=float)

    width = _root(excess, one, len(laws.E))
    tokens = budget / polynomial(flops, width)
    return Optima(
        width=width,
        budget=np.where(np.isnan(width), np.nan, budget),
        tokens=tokens,
        loss=laws.loss(one, width, tokens),
    )


def optima_at_loss(
    laws: Laws, one: Architecture, flops: tuple[float, float], loss: FloatArray
) -> Optima:
    """Compute-optimal models that reach a loss [R], whatever the budget that takes.

    Along optimal models the token term follows from the width, so that the loss does, too.
    """

    def excess(x: FloatArray) -> FloatArray:
        term = laws.A * laws.effective(one, np.exp(x)) ** -laws.alpha
        token_term = _optimal_token_term(laws, one, flops, x)
        return np.asarray(laws.E + term + token_term - loss, dtype=float)

    width = _root(excess, one, len(laws.E))
    token_term = _optimal_token_term(laws, one, flops, np.log(width))
    tokens = (token_term / laws.B) ** (-1 / laws.beta)
    return Optima(
        width=width,
        budget=tokens * polynomial(flops, width),
        tokens=tokens,
        loss=laws.loss(one, width, tokens),
    )


def _optimal_token_term(
    laws: Laws, one: Architecture, flops: tuple[float, float], x: FloatArray
) -> FloatArray:
    """B·D^−β that makes width e^x optimal: (α/β)·A·N_eff^−α·(log N_eff)′/(log F)′. [R] → [R]."""
    width = np.exp(x)
    gain = one.r**laws.phi
    n_linear = one.n_once[0] + gain * one.n_rec[0]
    n_square = one.n_once[1] + gain * one.n_rec[1]
    slopes = _slope(n_linear, n_square, width) / _slope(flops[0], flops[1], width)
    term = laws.A * laws.effective(one, width) ** -laws.alpha
    return np.asarray(laws.alpha / laws.beta * term * slopes, dtype=float)


def _slope(linear: FloatArray | float, square: FloatArray | float, width: FloatArray) -> FloatArray:
    """Take the derivative of log(c1·d + c2·d²) after log d."""
    return np.asarray((linear + 2 * square * width) / (linear + square * width), dtype=float)


def _root(excess: Callable[[FloatArray], FloatArray], one: Architecture, rows: int) -> FloatArray:
    """Width at which a falling function of log d crosses zero, NaN where it does not. [R]."""
    low = np.full(rows, np.log(one.smallest / WIDEN))
    high = np.full(rows, np.log(one.largest * WIDEN))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        inside = (excess(low) > 0) & (excess(high) < 0)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            above = excess(middle) > 0
            low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(inside, np.exp((low + high) / 2), np.nan)
