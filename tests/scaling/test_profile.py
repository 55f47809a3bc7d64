"""The profile of φ against separate fits, its ends against the equation, its coverage by simulation."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from scaling import RunTable, bootstrap, fit_joint
from scaling.fits.profile import THRESHOLD, PhiProfile, profile_phi


@pytest.fixture(scope="module")
def fit(_paper):
    return fit_joint(RunTable.of(_paper, split="regression"), n_starts=100)


@pytest.fixture(scope="module")
def profile(fit):
    return profile_phi(fit)


def test_points_equal_fits_with_phi_held(fit, profile):
    assert len(profile.points) > 8
    for phi, statistic in profile.points[::4]:
        held = fit_joint(fit.table, phi=phi, n_starts=100)
        wanted = 2 * fit.n_runs * np.log(held.objective / fit.objective)
        assert statistic == pytest.approx(wanted, abs=1e-6)  # 2n times a relative 1e-9


def test_ends_fulfil_the_equation(fit, profile):
    for end in (profile.low, profile.high):
        held = fit_joint(fit.table, phi=end, n_starts=100)
        assert 2 * fit.n_runs * np.log(held.objective / fit.objective) == pytest.approx(
            THRESHOLD, abs=1e-6
        )


def test_threshold_is_the_95_percent_quantile_of_chi_squared():
    assert chi2.ppf(0.95, 1) == pytest.approx(THRESHOLD, abs=2e-3)  # 3.8415, published as 3.84


def test_interval_of_the_papers_runs_is_shorter_than_the_bootstraps(fit, profile):
    drawn = bootstrap(fit)
    assert drawn.low < profile.low < fit.law.phi < profile.high < drawn.high


def test_flat_profile_has_an_open_end(make_grid, known_law):
    """Noise of 0.3 nats on 18 runs: no φ is ruled out on one side at least."""
    runs = make_grid(known_law, widths=(64, 96), noise=0.3)
    profile = profile_phi(fit_joint(runs, n_starts=50))
    assert profile.low is None or profile.high is None
    assert "stays below the threshold" in profile.reason


def test_exact_losses_have_no_scale_and_so_no_interval(make_grid, known_law):
    profile = profile_phi(fit_joint(make_grid(known_law), n_starts=50))
    assert (profile.low, profile.high) == (None, None)
    assert "exactly" in profile.reason


def test_lower_objective_beside_the_fit_is_told(fit):
    profile = profile_phi(replace(fit, objective=fit.objective * 1.01))
    assert profile.low is None
    assert "raise n_starts" in profile.reason


def test_held_phi_is_refused(fit):
    with pytest.raises(ValueError, match=r"phi was held at 0\.5"):
        profile_phi(fit_joint(fit.table, phi=0.5, n_starts=20))


def test_json_keeps_every_bit(profile):
    assert PhiProfile.from_json(profile.to_json()).points == profile.points


@pytest.mark.slow
def test_coverage_is_what_the_docstring_says(_paper, fit):
    """200 tables with the paper's design; two standard deviations of a share near 0.9: 0.05."""
    generator = np.random.default_rng(1)
    sigma, shares = fit.rmse, {}
    runs = fit.runs
    cell = runs.groupby(["budget_flops", "r"]).ngroup().to_numpy()
    n, sets = len(runs), 200
    for kind in ("gaussian", "laplace", "cell"):
        hits = 0
        for _ in range(sets):
            noise = generator.normal(size=n)
            if kind == "laplace":
                noise = generator.laplace(scale=np.sqrt(0.5), size=n)
            if kind == "cell":
                noise = np.sqrt(0.5) * (noise + generator.normal(size=cell.max() + 1)[cell])
            losses = runs["predicted"] * np.exp(sigma / runs["predicted"].mean() * noise)
            table = replace(fit.table, runs=runs.assign(loss=losses))
            found = profile_phi(fit_joint(table, n_starts=2))
            hits += found.low is not None and found.low <= fit.law.phi <= found.high
        shares[kind] = hits / sets
    print(shares)
    assert shares["gaussian"] == pytest.approx(0.90, abs=0.05)
    assert shares["laplace"] == pytest.approx(0.91, abs=0.05)
    assert shares["cell"] == pytest.approx(0.66, abs=0.07)
