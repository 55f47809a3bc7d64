"""Noise of a grid's losses: what each run has alone and what a (budget, r) cell shares.

Standard deviations in nats per token; ρ residuals of a fit, observed − predicted.
"""

from dataclasses import dataclass

import numpy as np

from ..fits.fit import Fit


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Standard deviations in nats: of each run alone, and of what a (budget, r) cell shares.

    The defaults are those of the paper's 116 runs about its joint law (variance components of the
    residuals, misfit of the law included), which is why more seeds would not average them away.
    """

    run: float = 0.009
    cell: float = 0.005

    def __post_init__(self) -> None:
        """Refuse negative or no noise."""
        for name, value in (("run", self.run), ("cell", self.cell)):
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(
                    f"Noise: {name} (--noise-{name}) is {value}, but must be a standard deviation in nats, at least "
                    "0. The paper's runs have 0.009 and 0.005."
                )
        if self.run == 0 and self.cell == 0:
            raise ValueError(
                "Noise: run and cell (--noise-run, --noise-cell) are both 0, so that every grid would "
                "give an exact φ. Give at least one; the paper's runs have 0.009 and 0.005."
            )

    @classmethod
    def of(cls, fit: Fit) -> "Noise":
        """Estimate both parts from a fit's residuals ρ by a one-way analysis of variance.

        Within cells s² = Σ (ρ − cell's mean)² / (n − cells), between them (Σ m·mean² / cells − s²)
        / (n / cells) with m runs in a cell, 0 where that is negative. Without budgets, or with one
        run a cell, all of it is the run's own.
        """
        residual = fit.runs["residual"]
        alone = cls(run=float(np.sqrt(np.mean(residual**2))), cell=0.0)
        if "budget_flops" not in fit.runs or fit.runs["budget_flops"].isna().any():
            return alone
        cells = residual.groupby([fit.runs["budget_flops"], fit.runs["r"]])
        sizes, means = cells.size(), cells.mean()
        n, count = len(residual), len(sizes)
        if n == count:
            return alone
        within = float(((residual - cells.transform("mean")) ** 2).sum()) / (n - count)
        between = float((sizes * means**2).sum()) / count - within
        return cls(run=float(np.sqrt(within)), cell=float(np.sqrt(max(between, 0.0) * count / n)))
