"""The test-time law: known curves come back, and designs that hide them are refused."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize

from scaling.fits.saturation import (
    SaturatingLaw,
    SaturationFit,
    fit_saturation,
    render_saturation,
)

FLOORS = {2: 2.90, 4: 2.80, 8: 2.72, 12: 2.70}  # L∞ of the run trained with mean recurrence μ
Z, RATE = 1.5, 3.2
TIMES = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def curves(noise=0.0, floors=FLOORS, times=TIMES, z=lambda mu: Z):
    generator = np.random.default_rng(3)
    return pd.DataFrame(
        [
            {
                "run_id": f"mu{mu}",
                "recurrences": mu,
                "test_recurrences": t,
                "val_loss": floor + z(mu) * np.exp(-RATE * t / mu) + noise * generator.normal(),
            }
            for mu, floor in floors.items()
            for t in times
        ]
    )


def test_known_curves_are_recovered_per_run_and_pooled():
    found = fit_saturation(curves())
    # residuals end near 1e-13; the Hessian's condition (1e4) magnifies them
    assert (found.Z, found.z) == pytest.approx((Z, RATE), rel=1e-8)
    for one in found.curves:
        assert one.law.L_inf == pytest.approx(FLOORS[int(one.mu)], rel=1e-8)
        assert (one.law.Z, one.law.z) == pytest.approx((Z, RATE), rel=1e-8)
        assert one.pooled.L_inf == pytest.approx(FLOORS[int(one.mu)], rel=1e-8)
        assert one.warnings == ()
    assert found.r2 == pytest.approx(1.0, abs=1e-12)


def test_noisy_curves_are_recovered_within_their_noise():
    found = fit_saturation(curves(noise=0.002))
    assert found.z == pytest.approx(RATE, rel=0.03)
    assert found.rmse == pytest.approx(0.002, rel=0.4)
    assert found.own_rmse < found.rmse  # nested: more parameters
    for one in found.curves:
        assert one.pooled.L_inf == pytest.approx(FLOORS[int(one.mu)], abs=0.004)


def test_scipy_finds_no_lower_objective():
    """Nelder-Mead on the definition, without gradients or our projection, is the referee."""
    frame = curves(noise=0.01, floors={4: 2.8})
    found = fit_saturation(frame)
    turns = frame["test_recurrences"].to_numpy() / 4

    def objective(x):
        size = np.abs(np.log(x[0] + x[1] * np.exp(-x[2] * turns)) - np.log(frame["val_loss"]))
        return float(np.where(size <= 1e-3, size**2 / 2, 1e-3 * (size - 5e-4)).sum())

    best = min(
        minimize(
            objective,
            start,
            method="Nelder-Mead",
            options={"xatol": 1e-12, "fatol": 1e-18, "maxiter": 5000, "maxfev": 5000},
        ).fun
        for start in ([2.8, 1.5, 3.2], [2.7, 1.0, 2.0], [2.9, 3.0, 5.0])
    )
    assert found.objective <= best * (1 + 1e-9)
    assert best == pytest.approx(found.objective, rel=1e-3)


def test_the_order_of_rows_does_not_matter():
    frame = curves(noise=0.002)
    shuffled = frame.sample(frac=1.0, random_state=0)
    one, two = fit_saturation(frame), fit_saturation(shuffled)
    assert two.z == pytest.approx(one.z, rel=1e-9)
    laws = {curve.run_id: curve.law for curve in two.curves}
    for curve in one.curves:
        assert laws[curve.run_id].z == pytest.approx(curve.law.z, rel=1e-6)


def test_runs_of_two_times_enter_the_pool_alone():
    """Each lacks a law of its own; together their T/μ differ enough."""
    frame = curves(times=(2, 6))
    found = fit_saturation(frame)
    assert (found.Z, found.z) == pytest.approx((Z, RATE), rel=1e-7)
    for one in found.curves:
        assert one.law is None
        assert "2 different T/μ" in one.reason
        assert one.pooled is not None


def test_a_rate_that_differs_between_runs_shows_in_the_pooled_error():
    found = fit_saturation(curves(z=lambda mu: 0.2 * mu))
    assert found.own_rmse < 1e-9
    assert found.rmse > 0.05


def test_one_time_per_run_is_refused():
    """Every L∞ would take its own run's loss: Z and z are free."""
    with pytest.raises(ValueError, match=r"mu2: 1 different T/μ.*pooled: 4 runs: 4 points leave"):
        fit_saturation(curves(times=(4,)))


def test_too_few_turns_are_refused_by_name():
    frame = curves(floors={4: 2.8}, times=(2, 8))
    with pytest.raises(ValueError, match=r"mu4: 2 different T/μ.*at least 3"):
        fit_saturation(frame)


def test_a_loss_that_does_not_fall_is_refused():
    frame = curves(floors={4: 2.8})
    frame["val_loss"] = frame["val_loss"].to_numpy()[::-1]
    with pytest.raises(ValueError, match=r"not below that at the fewest"):
        fit_saturation(frame)


def test_a_floor_out_of_sight_is_called_extrapolated():
    found = fit_saturation(curves(floors={12: 2.7}, times=(1, 2, 3, 4)))
    assert any("L∞ is extrapolated" in text for text in found.curves[0].warnings)
    assert "L∞ is extrapolated" in render_saturation(found)


def test_a_fall_within_the_noise_is_called_so():
    frame = curves(noise=0.01, floors={2: 2.9}, times=(6, 8, 10, 12, 16, 20, 24))
    frame.loc[0, "val_loss"] = frame["val_loss"].iloc[-1] + 0.001
    found = fit_saturation(frame)
    assert found.curves[0].warnings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="test_recurrences"), "column test_recurrences is missing"),
        (lambda f: f.drop(columns="recurrences"), "column recurrences is missing"),
        (lambda f: f.iloc[:0], "has no rows"),
        (lambda f: pd.concat([f, f.iloc[:1]]), r"run mu2 has test_recurrences = 1 twice"),
        (lambda f: f.assign(val_loss=np.nan), r"row 1 \(run mu2\): val_loss is nan"),
        (lambda f: f.assign(val_loss="high"), r"row 1 \(run mu2\): val_loss is high"),
        (lambda f: f.assign(test_recurrences=0), "test_recurrences is 0"),
        (lambda f: f.assign(recurrences=np.arange(1, len(f) + 1)), "9 values of recurrences"),
    ],
)
def test_bad_tables_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        fit_saturation(change(curves()))


def test_other_columns_can_hold_loss_and_mean_recurrence():
    frame = curves().rename(columns={"val_loss": "loss/math", "recurrences": "mean_recurrence"})
    found = fit_saturation(frame, loss="loss/math", mu="mean_recurrence")
    assert found.z == pytest.approx(RATE, rel=1e-8)


def test_the_law_is_its_formula_and_the_text_holds_the_numbers():
    law = SaturatingLaw(L_inf=2.5, Z=1.0, z=3.0)
    assert law.loss(6, 4) == pytest.approx(2.5 + np.exp(-4.5), rel=1e-15)
    assert law.left_at_mu == pytest.approx(law.loss(4, 4) - 2.5, rel=1e-12)
    found = fit_saturation(curves(noise=0.002))
    text = render_saturation(found)
    assert f"{found.z:.3f}" in text
    assert all(f"{one.law.L_inf:.4f}" in text for one in found.curves)


def test_results_survive_json():
    found = fit_saturation(curves(noise=0.002))
    back = SaturationFit.from_json(found.to_json())
    assert back.curves == found.curves
    pd.testing.assert_frame_equal(back.points, found.points)
