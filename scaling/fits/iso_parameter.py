"""Iso-parameter accounting of recurrences: every pass through the weights counts as new weights.

L = E + A·N_eff^−α + B·D^−β with no exponent for r. Two readings of N_eff:
"whole": r·N, the recurrences multiply all of the model's own parameters;
"unrolled": N_once + r·N_rec, the parameters of the unlooped model with the same layers. That is
what Parcae's training law counts, N(μ) for the mean recurrence μ (Prairie et al. 2026,
arXiv:2604.12946), and it is the joint law at φ = 1.
Symbols: N = N_once + N_rec matrix parameters of the model (count), r recurrences, D tokens, L loss in
nats per token. Parcae varies r at fixed N, the paper of the joint law varies it at fixed executed
layers; both are run tables to these fits.
"""

from dataclasses import dataclass, replace

from ..record import Record
from ..runs.table import RunTable
from ..solver.laws import Array, Chinchilla, FloatArray
from ..solver.solve import RANDOM_STARTS
from ..text import wrap
from .fit import ChinchillaFit, fit_chinchilla

COUNTINGS = ("whole", "unrolled")


@dataclass(frozen=True, kw_only=True, eq=False)
class IsoParameterFit(Record):
    """The law fitted to a table.

    counting: one of `COUNTINGS`. fit: Chinchilla's law with N_eff in place of N; the column n of its
    runs holds N_eff, and its objective, R² and residuals are those of this law.
    """

    counting: str
    fit: ChinchillaFit

    @property
    def law(self) -> Chinchilla:
        """The law, to be given N_eff (`effective_parameters`) as n."""
        return self.fit.law

    @property
    def recurrence_exponent(self) -> float:
        """Exponent of the best r in the budget at fixed N, β/(α + β), where C ∝ N_eff·D."""
        return self.law.beta / (self.law.alpha + self.law.beta)

    @property
    def token_exponent(self) -> float:
        """Exponent of the best D in the budget at fixed N, α/(α + β), where C ∝ N_eff·D."""
        return self.law.alpha / (self.law.alpha + self.law.beta)


def effective_parameters(n_once: Array, n_rec: Array, r: Array, counting: str = "whole") -> Array:
    """N_eff under a counting. [n] → [n].

    >>> effective_parameters(20e6, 10e6, 4), effective_parameters(20e6, 10e6, 4, "unrolled")
    (120000000.0, 60000000.0)
    """
    if counting not in COUNTINGS:
        raise ValueError(
            f"counting is {counting!r}, but must be one of {', '.join(COUNTINGS)}: r·N, or "
            "N_once + r·N_rec."
        )
    return r * (n_once + n_rec) if counting == "whole" else n_once + r * n_rec


def counted(table: RunTable, counting: str = "whole") -> FloatArray:
    """N_eff of every run. [n].

    "whole" takes the model's own N, which no split changes.
    """
    n, n_once, n_rec, r = (
        table.runs[name].to_numpy(dtype=float) for name in ("n", "n_once", "n_rec", "r")
    )
    if counting == "whole":
        n_once, n_rec = n, 0 * n
    values: FloatArray = r * 0 + effective_parameters(n_once, n_rec, r, counting)
    return values


def fit_iso_parameter(
    table: RunTable,
    *,
    counting: str = "whole",
    delta: float = 1e-3,
    n_starts: int = RANDOM_STARTS,
) -> IsoParameterFit:
    """Fit L = E + A·N_eff^−α + B·D^−β to the runs of a table.

    Raises ValueError for an unknown counting or a design that cannot identify the law.
    """
    runs = table.runs.assign(n=counted(table, counting))
    fit = fit_chinchilla(replace(table, runs=runs), delta=delta, n_starts=n_starts)
    return IsoParameterFit(counting=counting, fit=fit)


def render_iso_parameter(found: IsoParameterFit) -> str:
    """Write the law and what it says in two lines."""
    law, fit = found.law, found.fit
    name = "r·N" if found.counting == "whole" else "N_once + r·N_rec"
    return wrap(
        f"N_eff = {name}: α {law.alpha:.4f}, β {law.beta:.4f}, E {law.E:.4f}, A "
        f"{law.A:.4g}, B {law.B:.4g}; R² {fit.r2:.4f}, RMSE {fit.rmse:.4f} nats. "
        f"At fixed parameters it would have the best r grow as C^{found.recurrence_exponent:.2f} and "
        f"the tokens as C^{found.token_exponent:.2f} (C ∝ N_eff·D)."
    )
