"""U-curves of a learning-rate sweep: loss against log rate, the optimum, and what the base rate loses to it.

Method. At one condition (recurrences, width, horizon), u = log(rate / base). A least-squares parabola
c0 + c1·u + c2·u² goes through all runs at the rate of the lowest mean loss and at up to two rates on each side. Its
vertex is the optimum, and the regret of the base rate is its value at u = 0 less its minimum, c1² / (4·c2): never
negative by this definition, also where the base rate was the best one measured. A base rate beyond those five rates is
not on the parabola; its measured mean loss is taken, and the difference may then have either sign. Nothing is
extrapolated: a lowest loss at the first or last rate, or a vertex outside the parabola's rates, is flagged and has no
optimum. A rate at which any run diverged is left out.

The check is that of Schwethelm et al. 2026 (arXiv:2604.21106, appendix E.2), whose regrets stay within 0.005 nats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

TOLERANCE = 0.005  # nats: the largest regret in the paper's check
FLAT = 1e-9  # nats: less curvature over all rates of a parabola is rounding
REACH = 2  # rates on each side of the lowest that the parabola goes through


class Condition(NamedTuple):
    """Where a curve was measured: r, width in channels, horizon in tokens per executed parameter."""

    recurrences: int
    hidden_size: int
    tokens_per_parameter: float

    def __str__(self) -> str:
        return f"r = {self.recurrences}, width {self.hidden_size}, {self.tokens_per_parameter:g} tokens per parameter"


@dataclass(frozen=True, kw_only=True)
class UCurve:
    """One curve; rates in base-rate units, losses in nats per token.

    rates, losses: rates without a diverged run, ascending, and the mean loss over seeds at each. diverged: the others.
    base_loss: mean at the base rate, None if it diverged. seed_sd: standard deviation of the loss between seeds at one
    rate, pooled over rates; None with a single seed. optimum, loss, regret: the parabola's, None where `reason` says
    why. optimum_error (of log optimum) and regret_error: one standard error, to first order, from the residuals; None
    without residual degrees of freedom. edge: "lower" or "upper" end of the rates beyond which the optimum may lie.
    coefficients: (c0, c1, c2), fitted between the rates of `window`.
    """

    base: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: tuple[float, ...]
    runs: int
    base_loss: float | None
    seed_sd: float | None
    optimum: float | None = None
    optimum_error: float | None = None
    loss: float | None = None
    regret: float | None = None
    regret_error: float | None = None
    edge: str | None = None
    reason: str | None = None
    coefficients: tuple[float, float, float] | None = None
    window: tuple[float, float] | None = None

    @property
    def measured_regret(self) -> float | None:
        """Mean loss at the base rate less the lowest mean loss of the rates tried, ≥ 0; None if the base diverged."""
        return None if self.base_loss is None else self.base_loss - min(self.losses)

    @property
    def above_noise(self) -> bool | None:
        """Whether the regret exceeds the spread between seeds; None if either is unknown."""
        if self.regret is None or self.seed_sd is None:
            return None
        return self.regret > self.seed_sd


def fit(rates: Sequence[float], losses: Sequence[float], base: float) -> UCurve:
    """Fit the curve of one condition by the method above.

    Parameters
    ----------
    rates, losses
        One entry a run, [n]: base rate, positive, and final loss in nats per token, not finite if it diverged.
    base
        Base rate whose regret is asked for.
    """
    x, y = np.asarray(rates, dtype=float), np.asarray(losses, dtype=float)
    different = np.unique(x)
    diverged = {rate for rate in different if not np.isfinite(y[x == rate]).all()}
    kept = np.array([rate for rate in different if rate not in diverged])
    means = np.array([y[x == rate].mean() for rate in kept])
    at_base = np.isclose(kept, base, rtol=1e-9, atol=0)
    known: dict[str, Any] = {
        "base": base,
        "rates": tuple(kept.tolist()),
        "losses": tuple(means.tolist()),
        "diverged": tuple(sorted(float(rate) for rate in diverged)),
        "runs": len(x),
        "base_loss": float(means[at_base][0]) if at_base.any() else None,
        "seed_sd": _seed_sd([y[x == rate] for rate in kept]),
    }
    if len(kept) < 3:
        return UCurve(**known, reason=f"{len(kept)} rates did not diverge: a parabola needs 3")
    lowest = _lowest(means)
    if lowest in (0, len(kept) - 1):
        edge = "upper" if lowest else "lower"
        beyond = any((rate > kept[lowest]) == bool(lowest) for rate in diverged)
        return UCurve(**known, edge=edge, reason=_edge_reason(edge, beyond))
    window = kept[max(0, lowest - REACH) : lowest + REACH + 1]
    inside = np.isin(x, window)
    known["window"] = (float(window[0]), float(window[-1]))
    return UCurve(**known, **_optimum(np.log(x[inside] / base), y[inside], known))


def _optimum(
    u: NDArray[np.float64], loss: NDArray[np.float64], known: dict[str, Any]
) -> dict[str, Any]:
    """Fields that the parabola through (u, loss), [n], gives, or why it has no optimum."""
    powers = np.vander(u, 3)  # [n, 3]: u², u, 1
    inverse = np.linalg.pinv(powers)  # [3, n]
    c2, c1, c0 = (float(c) for c in inverse @ loss)
    found: dict[str, Any] = {"coefficients": (c0, c1, c2)}
    if c2 * np.ptp(u) ** 2 < FLAT:
        return found | {"reason": "not convex: flat, or noise hides the curve"}
    vertex, minimum = -c1 / (2 * c2), c0 - c1**2 / (4 * c2)
    if not u.min() <= vertex <= u.max():
        edge = "upper" if vertex > u.max() else "lower"
        return found | {"edge": edge, "reason": _edge_reason(edge, next_diverged=False)}
    found |= {"optimum": known["base"] * math.exp(vertex), "loss": minimum}
    on_parabola = u.min() <= 0 <= u.max()
    if known["base_loss"] is None:
        found["reason"] = "no finished run at the base rate"
    else:
        found["regret"] = c1**2 / (4 * c2) if on_parabola else known["base_loss"] - minimum
    freedom = len(u) - 3
    if freedom > 0:
        residual_sd = float(np.linalg.norm(loss - powers @ (c2, c1, c0))) / math.sqrt(freedom)
        of_vertex = np.array([c1 / (2 * c2**2), -1 / (2 * c2), 0])  # by c2, c1, c0
        of_regret = np.array([-(c1**2) / (4 * c2**2), c1 / (2 * c2), 0])
        found["optimum_error"] = residual_sd * float(np.linalg.norm(of_vertex @ inverse))
        if "regret" in found and on_parabola:
            found["regret_error"] = residual_sd * float(np.linalg.norm(of_regret @ inverse))
    return found


def _lowest(means: NDArray[np.float64]) -> int:
    """Index of the lowest mean; of equal ones, that nearest the middle."""
    middle = (len(means) - 1) / 2
    return int(min(np.flatnonzero(means == means.min()), key=lambda index: abs(index - middle)))


def _edge_reason(edge: str, next_diverged: bool) -> str:
    if next_diverged:
        return f"at the {edge} edge, next to a diverged rate: add factors between"
    return f"at the {edge} edge: widen the factors"


def _seed_sd(by_rate: Sequence[NDArray[np.float64]]) -> float | None:
    freedom = sum(len(losses) - 1 for losses in by_rate)
    if freedom < 1:
        return None
    squares = sum(float(((losses - losses.mean()) ** 2).sum()) for losses in by_rate)
    return math.sqrt(squares / freedom)


def verdict(name: str, curves: Mapping[Condition, UCurve]) -> str:
    """One sentence: within how many nats the base rate transfers, where it does not, and where that is open.

    It does not transfer where its regret (at least what was measured, if there is no optimum) is above both TOLERANCE
    and the spread between seeds, or where it diverged.
    """
    base = next(iter(curves.values())).base
    failing, undecided, passing = [], [], {}
    for condition, curve in curves.items():
        known = curve.measured_regret if curve.regret is None else curve.regret
        if base in curve.diverged:
            failing.append(f"{condition} (it diverged)")
        elif known is not None and known > max(TOLERANCE, curve.seed_sd or 0.0):
            regret = f"regret {'at least ' if curve.regret is None else ''}{known:.3f} nats"
            where = curve.reason or f"optimum {curve.optimum:.3g}"
            failing.append(f"{condition} ({regret}, {where})")
        elif curve.regret is None:
            undecided.append(f"{condition} ({curve.reason})")
        else:
            passing[condition] = curve.regret
    parts = []
    if failing:
        parts.append(f"does not transfer to {'; '.join(failing)}")
    if passing:
        worst = max(passing, key=lambda condition: passing[condition])
        parts.append(
            f"transfers within {passing[worst]:.3f} nats over {len(passing)} of {len(curves)} conditions (largest "
            f"regret: {worst})"
        )
    if undecided:
        parts.append(f"is open at {'; '.join(undecided)}")
    return f"{name} = {base:g} " + ", ".join(parts) + "."


def curve_table(name: str, curves: Mapping[Condition, UCurve]) -> Table:
    """Table of the curves, one a row."""
    table = Table(
        title=f"{name}: optimum and regret of the base rate, in nats per token",
        caption="D/N: tokens per executed parameter. Optimum, loss, regret: by the parabola in log rate, with one "
        "standard error of the fit. Measured: loss at the base rate less the lowest. Noise: spread between seeds.",
    )
    columns = ("r", "width", "D/N", "runs", "optimum", "loss", "regret", "measured", "noise")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", overflow="fold", min_width=20)
    for condition, curve in curves.items():
        notes = [curve.reason] if curve.reason else []
        if curve.above_noise is not None:
            notes.append("above the noise" if curve.above_noise else "within the noise")
        if curve.diverged:
            notes.append(f"diverged: {', '.join(f'{rate:.3g}' for rate in curve.diverged)}")
        table.add_row(
            str(condition.recurrences),
            str(condition.hidden_size),
            f"{condition.tokens_per_parameter:g}",
            str(curve.runs),
            _optimum_text(curve),
            _number(curve.loss, ".4f"),
            _number(curve.regret, ".4f", curve.regret_error),
            _number(curve.measured_regret, ".4f"),
            _number(curve.seed_sd, ".4f"),
            "; ".join(notes),
        )
    return table


def _optimum_text(curve: UCurve) -> str:
    """Return the optimum, with the factor that is one standard error."""
    if curve.optimum is None:
        return "–"
    error = "" if curve.optimum_error is None else f" ×/÷{math.exp(curve.optimum_error):.2f}"
    return f"{curve.optimum:.3g}{error}"


def _number(value: float | None, form: str, error: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")
