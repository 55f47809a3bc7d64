"""Growth of the compute-optimal model: the published exponents, both ways, and closed forms."""

import numpy as np
import pytest

from scaling.fits.subsets import per_architecture
from scaling.optima.exponents import Exponents, frontier_exponents, power_of_flops
from scaling.optima.frontier import architectures, frontier
from scaling.runs.table import RunTable

PUBLISHED = {1: (0.57, 0.53), 2: (0.70, 0.42), 4: (0.76, 0.37), 8: (0.67, 0.44)}  # N*, D*
EXACT = {1: (0.495, 0.587), 2: (0.622, 0.479), 4: (0.668, 0.433), 8: (0.599, 0.486)}
STARTS = 40


@pytest.fixture(scope="module")
def table(paper_path):
    return RunTable.read(paper_path, split="regression")


@pytest.fixture(scope="module")
def own(table):
    return per_architecture(table, n_starts=STARTS)


@pytest.fixture(scope="module")
def found(table, own):
    return {one.r: one for one in frontier_exponents(table, own)}


@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_a_power_law_of_flops_gives_the_published_exponents(found, r):
    one = found[r]
    # half a unit of the published digit
    assert (one.power_law.n, one.power_law.tokens) == pytest.approx(PUBLISHED[r], abs=5e-3)


@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_exact_flops_give_other_exponents(found, r):
    one = found[r]
    # known to three digits, over the table's budgets
    assert (one.exact.n, one.exact.tokens) == pytest.approx(EXACT[r], abs=1e-3)
    assert not one.extrapolated and one.reason is None


def test_both_ways_give_the_closed_form_when_flops_are_proportional_to_parameters(
    make_grid, known_law
):
    """γ = 1: N* ∝ C^(β/(α+β)), D* ∝ C^(α/(α+β)), L* − E ∝ C^(−αβ/(α+β))  (Hoffmann, eq. 4)."""
    alpha, beta = known_law.alpha, known_law.beta
    closed = np.array([beta, alpha, alpha * beta]) / (alpha + beta)
    for one in frontier_exponents(RunTable.of(make_grid(known_law)), known_law):
        n = 48 + 192 / one.r
        assert (one.k, one.gamma) == pytest.approx((6 * 240 / n, 1.0), rel=1e-9)
        for growth in (one.exact, one.power_law):
            # a minimum's position is known to about 1e-7 (square root of rounding)
            assert (growth.n, growth.tokens, growth.loss) == pytest.approx(closed, abs=1e-6)


def test_exact_exponents_are_local_slopes_of_the_frontier_on_a_narrow_range(table, own):
    """At budgets 1 % apart the envelope theorem gives dL*/d log C = −β·B·D*^−β."""
    law = own[0].fit.law
    (architecture,) = (one for one in architectures(table.runs)[0] if one.r == 1)
    near = frontier(law, (architecture,), (1e18, 1.01e18))
    slope = np.diff(near["loss"])[0] / np.log(1.01)
    middle = np.sqrt(near["tokens"].prod())
    assert slope == pytest.approx(-law.beta * law.B * middle**-law.beta, rel=1e-4)


def test_the_joint_law_gives_every_architecture_nearly_the_same_exponents(table, paper_analysis):
    """One α and β for all: only γ differs, and that by less than 1 %."""
    found = frontier_exponents(table, paper_analysis.fit.law)
    assert [one.r for one in found] == [1, 2, 4, 8]
    assert np.ptp([one.power_law.n for one in found]) < 0.005
    assert np.ptp([one.exact.n for one in found]) < 0.005


def test_gamma_weighs_every_width_once(table):
    """The same line with more runs of one width: a width tried at more budgets counts no more."""
    runs = table.runs[table.runs["r"] == 1]
    twice = runs.loc[[*runs.index, *runs.index[runs["hidden_size"] == 640]]]
    assert power_of_flops(twice) == power_of_flops(runs)
    sizes = runs.groupby("hidden_size")[["n", "train_flops_per_token"]].first()
    x, y = np.log(sizes["n"]), np.log(sizes["train_flops_per_token"])
    slope = np.sum((x - x.mean()) * (y - y.mean())) / np.sum((x - x.mean()) ** 2)
    assert power_of_flops(runs)[1] == pytest.approx(slope, rel=1e-9)


def test_what_cannot_be_computed_is_none_with_a_reason(make_grid, known_law):
    grid = make_grid(known_law)
    (one, *_) = frontier_exponents(
        RunTable.of(grid.drop(columns="train_flops_per_token")), known_law
    )
    assert (one.exact, one.power_law) == (None, None)
    assert one.reason == "column train_flops_per_token is missing"
    (one, *_) = frontier_exponents(RunTable.of(grid.drop(columns="budget_flops")), known_law)
    assert one.exact is None and one.power_law is not None
    assert one.reason == "column budget_flops is missing"
    (one, *_) = frontier_exponents(RunTable.of(grid[grid["budget_flops"] == 1e14]), known_law)
    assert one.exact is None and one.reason == "1 budget, a slope needs 2"


def test_an_architecture_without_a_fit_has_its_reason(make_grid, known_law):
    table = RunTable.of(make_grid(known_law, widths=(64, 96)))
    own = per_architecture(table, n_starts=STARTS)
    for one, alone in zip(frontier_exponents(table, own), own, strict=True):
        assert one.exact is None and one.power_law is None
        assert one.reason == alone.reason and "parameter counts" in one.reason
    found = frontier_exponents(table, own[:1])
    assert found[2].reason == "no fit of r = 4 was given"


def test_optima_far_outside_the_widths_are_said(make_grid, known_law):
    """Budgets for models some ten times wider than the table's, and then beyond every search."""
    grid = make_grid(known_law)
    for scale, widths, reason in ((1e4, "outside", None), (1e16, "nowhere", "largest searched")):
        far = grid.assign(budget_flops=grid["budget_flops"] * scale)
        for one in frontier_exponents(RunTable.of(far), known_law):
            assert one.extrapolated, widths
            assert (one.exact is None) == (reason is not None)
            assert reason is None or reason in one.reason


def test_results_come_back_from_their_json(found):
    assert Exponents.from_json(found[4].to_json()) == found[4]
