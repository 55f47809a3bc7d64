"""Compute optima under many laws against the frontier's one-law minimiser and closed forms."""

import numpy as np
import pytest

from scaling.optima.frontier import architectures, optimum
from scaling.optima.optima import Laws, optima_at_budget, optima_at_loss
from scaling.runs.table import RunTable
from scaling.solver.laws import JointLaw

LAWS = [
    JointLaw(E=1.57, A=28.0, alpha=0.199, B=916.0, beta=0.369, phi=0.46),
    JointLaw(E=1.85, A=60.0, alpha=0.266, B=5000.0, beta=0.457, phi=0.65),
    JointLaw(E=0.0, A=10.0, alpha=0.1, B=300.0, beta=0.3, phi=-0.2),
]


@pytest.fixture
def found(paper):
    return architectures(RunTable.of(paper).runs)[0]


@pytest.mark.parametrize("budget", [4.64e17, 2.15e19])
def test_optimum_of_every_law_is_the_frontiers(found, budget):
    for one in found:
        many = optima_at_budget(Laws.of(LAWS), one, one.flops, budget)
        for k, law in enumerate(LAWS):
            single = optimum(law, one, budget)
            # rel 1e-5: the frontier minimises the loss, flat at its minimum to the root of eps
            assert many.width[k] == pytest.approx(single.hidden_size, rel=1e-5)
            assert many.loss[k] == pytest.approx(single.loss, rel=1e-12)


def test_without_linear_terms_the_width_has_a_closed_form(make_grid):
    """With all counts ∝ d²: n = g·d², C = 6·F·d²·D: d^(2(α+β)) = αA·g^−α·(C/f)^β / (βB)."""
    (one,) = architectures(RunTable.of(make_grid(LAWS[0], rs=(4,))).runs)[0]
    law, budget = LAWS[0], 3e15
    g, f = 48 + 4**law.phi * 48, 6 * (48 + 192)
    amplitude = law.alpha * law.A * g**-law.alpha / (law.beta * law.B) * (budget / f) ** law.beta
    expected = amplitude ** (1 / (2 * (law.alpha + law.beta)))
    many = optima_at_budget(Laws.of([law]), one, one.flops, budget)
    assert many.width[0] == pytest.approx(expected, rel=1e-9)  # bisection to the last bits


def test_optimum_at_a_loss_is_that_of_the_budget_it_takes(found):
    for one in found:
        laws = Laws.of(LAWS)
        first = optima_at_budget(laws, one, one.flops, 1e19)
        again = optima_at_loss(laws, one, one.flops, first.loss)
        # rel 1e-7: the loss determines the budget to its own last bits over its small slope
        assert again.budget == pytest.approx(1e19, rel=1e-7)
        assert again.width == pytest.approx(first.width, rel=1e-7)


def test_a_loss_below_e_and_a_budget_beyond_the_searched_widths_have_no_optimum(found):
    laws = Laws.of(LAWS[:1])
    below = optima_at_loss(laws, found[0], found[0].flops, np.array([1.5]))
    assert np.isnan([below.width[0], below.budget[0], below.loss[0]]).all()
    tiny = optima_at_budget(laws, found[0], found[0].flops, 1e3)
    assert np.isnan([tiny.width[0], tiny.budget[0], tiny.loss[0]]).all()
