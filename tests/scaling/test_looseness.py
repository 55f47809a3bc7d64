"""The loosest direction against the spread of refits, and when it is warned about."""

from dataclasses import replace

import numpy as np
import pytest

from scaling import RunTable, analyse, fit_chinchilla, fit_joint
from scaling.fits.looseness import LooseDirection, loose_direction, loose_warnings
from scaling.reports.report import render, render_chinchilla
from scaling.solver.solve import from_law

UNITS = {"A": 0.5, "B": 0.5, "E": 0.15, "alpha": 0.25, "beta": 0.25, "phi": 0.15}  # as documented


@pytest.fixture(scope="module")
def table(_paper):
    return RunTable.of(_paper, split="regression")


@pytest.fixture(scope="module")
def narrow(table):
    """Two neighbouring budgets and two r: the runs that determine least."""
    budgets = table.budgets()[:2]
    return table.where((table.runs["budget_flops"] <= budgets[-1]) & (table.runs["r"] <= 2))


def test_largest_spread_of_refits_is_the_loosest_direction(table):
    """Least squares (δ = 1) under Gaussian noise of the fit's size; 200 refits: an sd to 5 %."""
    fit = fit_joint(table, delta=1.0, n_starts=20)
    found = loose_direction(fit)
    generator = np.random.default_rng(0)
    spread = np.sqrt(np.sum(np.log(fit.runs["loss"] / fit.runs["predicted"]) ** 2) / (116 - 6))
    refits = []
    for _ in range(200):
        losses = fit.runs["predicted"] * np.exp(spread * generator.normal(size=116))
        again = fit_joint(replace(table, runs=table.runs.assign(loss=losses)), delta=1, n_starts=2)
        refits.append(from_law(fit.design, again.law))
    units = np.array(list(UNITS.values()))
    units[3:5] *= fit.law.alpha, fit.law.beta
    sizes, directions = np.linalg.eigh(np.cov(np.array(refits).T / units[:, None]))
    assert found.size == pytest.approx(np.sqrt(sizes[-1]), rel=0.15)
    shifts = np.array([*found.shifts.values()])
    shifts[2] /= fit.law.E
    cosine = directions[:, -1] @ (shifts / units) / found.size
    assert abs(cosine) > 0.95


def test_the_papers_runs_and_their_halves_are_not_warned_about(table):
    budgets = table.runs["budget_flops"]
    third = table.budgets()[2]
    for part in (table, table.where(budgets <= third), table.where(budgets > third)):
        assert loose_warnings(fit_joint(part, n_starts=40)) == []
    for r in (1, 2, 4, 8):
        assert loose_warnings(fit_chinchilla(table.where(table.runs["r"] == r), n_starts=40)) == []


def test_a_narrow_table_is_warned_about_by_name(narrow):
    analysis = analyse(narrow, resamples=10)
    (text,) = (one for one in analysis.warnings if "weakly identified" in one)
    assert "E +" in text and "α +" in text and "β" not in text
    assert "weakly identified" in render(analysis)


def test_a_loose_chinchilla_fit_says_so(narrow):
    fit = fit_chinchilla(narrow, n_starts=40)
    assert "weakly identified" in render_chinchilla(fit)
    assert "phi" not in loose_direction(fit).shifts


def test_held_parameters_do_not_move(narrow):
    free, held = (loose_direction(fit_joint(narrow, phi=phi, n_starts=40)) for phi in (None, 0.5))
    assert list(free.shifts) == list(UNITS)
    assert list(held.shifts) == list(UNITS)[:-1]


def test_exact_losses_leave_nothing_loose(make_grid, known_law):
    """Rounding alone: 1e-16 in the log, divided by singular values above 1e-4."""
    assert loose_direction(fit_joint(make_grid(known_law), n_starts=40)).size < 1e-6


def test_json_keeps_every_bit(narrow):
    found = loose_direction(fit_joint(narrow, n_starts=40))
    assert LooseDirection.from_json(found.to_json()).shifts == found.shifts
