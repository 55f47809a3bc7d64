"""The Huber objective of the joint law with its exact gradient and Hessian, row by row.

Symbols: θ = (a, b, e, α, β, φ) in logs centred on the table; z₁ = a − α·log N_eff, z₂ = b −
β·log D, z₃ = e; ρ = LSE(z) − log L the log residual; p = softmax(z); q = r^φ·N_rec/N_eff the
share of the shared block. Shapes: R parameter rows, n runs. Source: Schwethelm et al. 2026
(arXiv:2604.21106), eq. 3 and 4.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .laws import FloatArray

_CHUNK = 15_000  # rows times runs at once: larger batches leave the cache
NAMES = ("A", "B", "E", "alpha", "beta", "phi")


@dataclass(frozen=True, kw_only=True, eq=False)
class Design:
    """Runs as the solver sees them, all arrays [n]; build it with `Design.of`.

    once, rec: N_once and N_rec divided by exp(mean_log_n); log_r, log_d, log_loss, log_c natural
    logs, log_d centred. log_c: training compute, which no law reads but `identify` does.
    """

    once: FloatArray
    rec: FloatArray
    log_r: FloatArray
    log_d: FloatArray
    log_loss: FloatArray
    log_c: FloatArray
    mean_log_n: float
    mean_log_d: float

    @classmethod
    def of(
        cls,
        *,
        n_once: FloatArray,
        n_rec: FloatArray,
        r: FloatArray,
        tokens: FloatArray,
        loss: FloatArray,
        budget: FloatArray | None = None,
    ) -> "Design":
        """Build from counts, nats per token and FLOPs (default 6·(N_once + r·N_rec)·D).

        All [n] and positive (one of n_once, n_rec may be 0).
        """
        n_once, n_rec = np.asarray(n_once, dtype=float), np.asarray(n_rec, dtype=float)
        log_n = np.log(n_once + n_rec)
        log_d = np.log(np.asarray(tokens, dtype=float))
        log_c = np.log(6 * (n_once + r * n_rec)) + log_d if budget is None else np.log(budget)
        mean_n, mean_d = float(log_n.mean()), float(log_d.mean())
        return cls(
            once=n_once / np.exp(mean_n),
            rec=n_rec / np.exp(mean_n),
            log_r=np.log(np.asarray(r, dtype=float)),
            log_d=log_d - mean_d,
            log_loss=np.log(np.asarray(loss, dtype=float)),
            log_c=log_c,
            mean_log_n=mean_n,
            mean_log_d=mean_d,
        )

    @property
    def n(self) -> int:
        """Number of runs."""
        return len(self.log_loss)

    def part(self, keep: NDArray[np.bool_] | NDArray[np.intp] | slice) -> "Design":
        """Only the runs at `keep`, centred as before."""
        names = ("once", "rec", "log_r", "log_d", "log_loss", "log_c")
        return replace(self, **{name: getattr(self, name)[keep] for name in names})


@dataclass(frozen=True, kw_only=True, eq=False)
class Derivatives:
    """Objective f [R], gradient [R, 6], Hessian [R, 6, 6] and the majoriser's diagonal [R, 6]."""

    f: FloatArray
    gradient: FloatArray
    hessian: FloatArray
    majoriser: FloatArray

    def rows(self, keep: NDArray[np.bool_]) -> "Derivatives":
        """Only the rows where `keep` [R] is true."""
        return Derivatives(
            f=self.f[keep],
            gradient=self.gradient[keep],
            hessian=self.hessian[keep],
            majoriser=self.majoriser[keep],
        )

    def where(self, choose: NDArray[np.bool_], other: "Derivatives") -> "Derivatives":
        """Take these rows where `choose` [R] is true, the other's elsewhere."""
        return Derivatives(
            f=np.where(choose, self.f, other.f),
            gradient=np.where(choose[:, None], self.gradient, other.gradient),
            hessian=np.where(choose[:, None, None], self.hessian, other.hessian),
            majoriser=np.where(choose[:, None], self.majoriser, other.majoriser),
        )

    def replaced(self, at: NDArray[np.bool_], rows: "Derivatives") -> "Derivatives":
        """Copy, with `rows` in place of the rows at `at` [R]."""
        copy = [value.copy() for value in (self.f, self.gradient, self.hessian, self.majoriser)]
        for value, new in zip(
            copy, (rows.f, rows.gradient, rows.hessian, rows.majoriser), strict=True
        ):
            value[at] = new
        return Derivatives(f=copy[0], gradient=copy[1], hessian=copy[2], majoriser=copy[3])


def evaluate(
    design: Design, theta: FloatArray, weights: FloatArray, delta: float, exact: NDArray[np.bool_]
) -> Derivatives:
    """f, ∇f and a Hessian at every row of `theta` [R, 6] under its row of `weights` [R, n].

    Rows where `exact` [R] is true get ∇²f = Σ (ψ′ − ψ)·g·gᵀ + ψ·Σ_k (p_k·c_k·c_kᵀ + p_k·∇²z_k),
    with c_k = ∇z_k, g = Σ_k p_k·c_k = ∇LSE and ψ = w·Huber′; the others the majoriser Σ w·min(1,
    δ/|ρ|)·g·gᵀ, positive semidefinite.
    """
    if design.n > _CHUNK:
        return _over_blocks(design, theta, weights, delta, exact)
    rows = max(1, _CHUNK // design.n)
    parts = [slice(at, at + rows) for at in range(0, len(theta), rows)]
    done = [_evaluate(design, theta[p], weights[p], delta, exact[p]) for p in parts]
    if len(done) == 1:
        return done[0]
    return Derivatives(
        f=np.concatenate([one.f for one in done]),
        gradient=np.concatenate([one.gradient for one in done]),
        hessian=np.concatenate([one.hessian for one in done]),
        majoriser=np.concatenate([one.majoriser for one in done]),
    )


def _over_blocks(
    design: Design, theta: FloatArray, weights: FloatArray, delta: float, exact: NDArray[np.bool_]
) -> Derivatives:
    """Evaluate a large table block of runs by block, row by row, and add up."""
    k = len(NAMES)
    out = Derivatives(
        f=np.zeros(len(theta)),
        gradient=np.zeros((len(theta), k)),
        hessian=np.zeros((len(theta), k, k)),
        majoriser=np.zeros((len(theta), k)),
    )
    for block in (slice(at, at + _CHUNK) for at in range(0, design.n, _CHUNK)):
        runs = design.part(block)
        for row in (slice(at, at + 1) for at in range(len(theta))):
            one = _evaluate(runs, theta[row], weights[row, block], delta, exact[row])
            out.f[row] += one.f
            out.gradient[row] += one.gradient
            out.hessian[row] += one.hessian
            out.majoriser[row] += one.majoriser
    return out


def residuals(design: Design, theta: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Log residuals ρ [n] and their derivatives [n, 6] at one θ [6]."""
    at = _predict(design, theta[None])
    return at.residual[0], at.g[0].T


@dataclass(frozen=True, kw_only=True, eq=False)
class _Prediction:
    """ρ [R, n], ∇ρ [R, 6, n], and log N_eff, its slope in φ and the share q.

    The last three are [R, n], or [1, n] where all rows have one φ.
    """

    residual: FloatArray
    g: FloatArray
    log_n: FloatArray
    slope: FloatArray
    share: FloatArray

    def rows(self, index: NDArray[np.intp]) -> "_Prediction":
        """Only the rows at `index`."""
        common = len(self.log_n) == 1
        return _Prediction(
            residual=self.residual[index],
            g=self.g[index],
            log_n=self.log_n if common else self.log_n[index],
            slope=self.slope if common else self.slope[index],
            share=self.share if common else self.share[index],
        )


def _predict(design: Design, theta: FloatArray) -> _Prediction:
    a, b, e, alpha, beta, phi = (theta[:, k : k + 1] for k in range(6))  # [R, 1]
    if np.all(phi == phi[0]):
        phi = phi[:1]
    looped = np.exp(phi * design.log_r) * design.rec  # [R, n]
    n_eff = design.once + looped
    log_n = np.log(n_eff)
    share = looped / n_eff
    slope = share * design.log_r  # ∂ log N_eff / ∂φ
    term_n, term_d, term_e = np.exp(a - alpha * log_n), np.exp(b - beta * design.log_d), np.exp(e)
    total = term_n + term_d
    total += term_e
    g = np.empty((len(theta), 6, design.n))  # ∇LSE
    p_n, p_d = np.divide(term_n, total, out=g[:, 0]), np.divide(term_d, total, out=g[:, 1])
    np.divide(term_e, total, out=g[:, 2])
    np.multiply(p_n, -log_n, out=g[:, 3])
    np.multiply(p_d, -design.log_d, out=g[:, 4])
    np.multiply(-alpha * p_n, slope, out=g[:, 5])
    residual = np.log(total, out=total)
    residual -= design.log_loss
    return _Prediction(residual=residual, g=g, log_n=log_n, slope=slope, share=share)


def _evaluate(
    design: Design,
    theta: FloatArray,
    weights: FloatArray,
    delta: float,
    exact: NDArray[np.bool_],
) -> Derivatives:
    """Evaluate one chunk of rows, small enough for its arrays [R, 6, n] to stay in the cache."""
    at = _predict(design, theta)
    g = at.g
    size = np.abs(at.residual)
    clipped = np.minimum(size, delta)
    psi = weights * clipped
    f = np.sum(psi * (size - 0.5 * clipped), axis=1)  # Huber: c·(|ρ| − c/2), c = min(|ρ|, δ)
    psi = np.copysign(psi, at.residual)
    major = weights * (delta / np.maximum(size, delta))
    gradient = (g @ psi[:, :, None])[:, :, 0]
    outer = np.where(exact[:, None], weights * (size <= delta) - psi, major)
    hessian = (g * outer[:, None, :]) @ g.transpose(0, 2, 1)
    majoriser = np.diagonal(hessian, axis1=1, axis2=2).copy()
    if exact.any():
        rows = np.flatnonzero(exact)
        majoriser[rows] = ((g[rows] ** 2) @ major[rows][:, :, None])[:, :, 0]
        hessian[rows] += _curvature(design, psi[rows], at.rows(rows), theta[rows, 3:4])
    return Derivatives(f=f, gradient=gradient, hessian=hessian, majoriser=majoriser)


def _curvature(design: Design, psi: FloatArray, at: _Prediction, alpha: FloatArray) -> FloatArray:
    """Σ_i ψ_i·Σ_k (p_k·c_k·c_kᵀ + p_k·∇²z_k).

    The part of the Hessian beyond the outer product of ∇LSE. [R, 6, 6].
    """
    bend_n, bend_d, bend_e = (psi * at.g[:, k] for k in range(3))  # ψ·p_k, [R, n]
    c_a, c_phi = -at.log_n, -alpha * at.slope  # ∂z₁/∂α and ∂z₁/∂φ; ∂z₁/∂a = 1
    out = np.zeros((len(psi), 6, 6))
    for (i, j), value in {
        (0, 0): bend_n.sum(axis=1),
        (0, 3): _dot(bend_n, c_a),
        (0, 5): _dot(bend_n, c_phi),
        (3, 3): _dot(bend_n, c_a * c_a),
        (3, 5): _dot(bend_n, c_a * c_phi - at.slope),  # ∂²z₁/∂α∂φ = −q·log r
        (5, 5): _dot(bend_n, c_phi * (c_phi + (1 - at.share) * design.log_r)),
        (1, 1): bend_d.sum(axis=1),
        (1, 4): -bend_d @ design.log_d,
        (4, 4): bend_d @ design.log_d**2,
        (2, 2): bend_e.sum(axis=1),
    }.items():
        out[:, i, j] = out[:, j, i] = value
    return out


def _dot(rows: FloatArray, others: FloatArray) -> FloatArray:
    """Sum of products over the runs, [R, n] × [R or 1, n] → [R]."""
    if len(others) == 1:
        return np.asarray(rows @ others[0], dtype=float)
    return np.asarray(np.einsum("rn,rn->r", rows, others), dtype=float)
