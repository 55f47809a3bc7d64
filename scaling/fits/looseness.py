"""The direction in which a fit is loose: parameters that can move together and hardly change a loss.

With J = ∂(log prediction)/∂θ at the optimum, T the diagonal of the thresholds and s² = Σρ²/(n − p),
J·T = U·S·Vᵀ: one standard error along the last column v of V is T·v·s/S_min, and no direction has a
longer one in units of the thresholds.
"""

from dataclasses import dataclass

import numpy as np

from ..record import Record
from ..solver.laws import Chinchilla, FloatArray, JointLaw
from ..solver.objective import NAMES, residuals
from ..solver.solve import from_law
from .fit import ChinchillaFit, JointFit

LOOSE_TERM = 0.5  # standard error of the log of A's or B's term at the mean run
LOOSE_E = 0.15  # of log E
LOOSE_EXPONENT = 0.25  # of log α and log β
LOOSE_PHI = 0.15
_PART = 0.3  # of the direction, below which a parameter is not named
_SINGULAR = 1e-12  # of the largest singular value: where rounding hides the smallest


@dataclass(frozen=True, kw_only=True, eq=False)
class LooseDirection(Record):
    """One standard error along the loosest direction.

    size: its length in units of the thresholds `LOOSE_…`; above 1 the fit is weakly identified.
    shifts: what each free parameter moves by, all at once; E in nats, A and B as the log of their
    term at the mean run, exponents as they are.
    """

    size: float
    shifts: dict[str, float]


def loose_direction(fit: JointFit | ChinchillaFit) -> LooseDirection:
    """Find the loosest direction of a fit, parameters on a bound or held left out."""
    if isinstance(fit, JointFit):
        law, phi_held = fit.law, fit.phi_fixed is not None
    else:
        law, phi_held = JointLaw(**vars(fit.law), phi=0.0), True
    held = (*fit.at_bound, "phi") if phi_held else fit.at_bound
    rho, jacobian = residuals(fit.design, from_law(fit.design, law))
    free = [k for k, name in enumerate(NAMES) if name not in held]
    units = _units(law)[free]
    singular, directions = np.linalg.svd(jacobian[:, free] * units, full_matrices=False)[1:]
    left = max(1, len(rho) - len(free))
    spread = float(np.sqrt(np.sum(rho**2) / left))
    size = spread / max(singular[-1], _SINGULAR * singular[0])
    last = directions[-1]
    ahead = last[-1] if NAMES[free[-1]] == "phi" else last[np.argmax(np.abs(last))]
    moves = units * last * size * (1 if ahead >= 0 else -1)
    shifts = {NAMES[k]: float(move) for k, move in zip(free, moves, strict=True)}
    if "E" in shifts:
        shifts["E"] *= law.E
    return LooseDirection(size=float(size), shifts=shifts)


def loose_warnings(fit: JointFit | ChinchillaFit) -> list[str]:
    """Name the loosest direction in one sentence, where it is longer than its thresholds allow."""
    found = loose_direction(fit)
    if found.size <= 1:
        return []
    units = dict(zip(NAMES, _units(fit.law), strict=True))
    units["E"] = LOOSE_E * fit.law.E
    names = [
        name for name, move in found.shifts.items() if abs(move) >= _PART * units[name] * found.size
    ]
    together = ", ".join(_WORDS[name].format(found.shifts[name]) for name in names)
    return [
        f"weakly identified: the loosest direction has a standard error of {together}"
        + (" together" if len(names) > 1 else "")
        + "; these numbers mean little one by one. Add budgets, widths or r further apart."
    ]


_WORDS = {
    "A": "log(A·N^−α) {:+.2f}",
    "B": "log(B·D^−β) {:+.2f}",
    "E": "E {:+.2f} nats",
    "alpha": "α {:+.3f}",
    "beta": "β {:+.3f}",
    "phi": "φ {:+.3f}",
}


def _units(law: JointLaw | Chinchilla) -> FloatArray:
    exponents = (LOOSE_EXPONENT * law.alpha, LOOSE_EXPONENT * law.beta)
    return np.array([LOOSE_TERM, LOOSE_TERM, LOOSE_E, *exponents, LOOSE_PHI])
