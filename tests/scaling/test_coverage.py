"""How often the bootstrap's 95 % interval of φ holds the truth, in tables with the paper's design."""

from dataclasses import replace

import numpy as np
import pytest

from scaling import RunTable, bootstrap, fit_joint

TABLES = 300  # a share of 0.94 is then known to 0.014


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 0.5], ids=["independent", "half of it shared by the cell"])
def test_coverage_lies_between_90_and_98_percent(_paper, shared):
    """Gaussian errors of the fit's size; `shared` is the part of their variance that a cell shares."""
    fit = fit_joint(RunTable.of(_paper, split="regression"), n_starts=100)
    cells = fit.runs.groupby(["budget_flops", "r"]).ngroup().to_numpy()
    assert cells.max() + 1 == 24
    sigma = fit.rmse / fit.runs["predicted"].mean()  # of the log loss
    generator = np.random.default_rng(2026)
    hits, widths = 0, []
    for k in range(TABLES):
        noise = np.sqrt(1 - shared) * generator.normal(size=fit.n_runs)
        noise += np.sqrt(shared) * generator.normal(size=24)[cells]
        runs = fit.runs.assign(loss=fit.runs["predicted"] * np.exp(sigma * noise))
        drawn = bootstrap(fit_joint(replace(fit.table, runs=runs), n_starts=2), seed=k)
        hits += drawn.low <= fit.law.phi <= drawn.high
        widths.append(drawn.high - drawn.low)
    print(f"coverage {hits / TABLES:.3f}, median width {np.median(widths):.3f}")
    assert 0.90 <= hits / TABLES <= 0.98
