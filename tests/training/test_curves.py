"""U-curves against closed forms, numpy's polynomial fit, and simulated noise."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from training.curves import TOLERANCE, Condition, curve_table, fit, verdict

BASE = 0.014
FACTORS = np.array([0.5, 0.7, 1.0, 1.4, 2.0])
RATES = BASE * FACTORS
A, B = Condition(1, 64, 10.0), Condition(4, 32, 5.0)


def parabola(optimum, curvature=0.1, loss=3.0):
    """loss + curvature·(log(rate / optimum))² at RATES."""
    return loss + curvature * np.log(RATES / optimum) ** 2


@pytest.mark.parametrize("optimum", [0.009, 0.014, 0.0173, 0.0196])
def test_an_exact_parabola_in_log_rate_is_recovered(optimum):
    """Its own constants, by hand: regret = curvature · log(base / optimum)²; 1e-10 is above the rounding of a solve."""
    curve = fit(RATES, parabola(optimum, curvature=0.3, loss=2.5), BASE)
    assert curve.optimum == pytest.approx(optimum, rel=1e-10)
    assert curve.loss == pytest.approx(2.5, rel=1e-10)
    assert curve.regret == pytest.approx(0.3 * math.log(BASE / optimum) ** 2, abs=1e-10)
    assert curve.optimum_error == pytest.approx(0, abs=1e-10)
    assert curve.edge is None and curve.reason is None


def test_the_order_of_runs_does_not_matter_and_neither_does_the_unit_of_the_rate():
    losses = parabola(0.016)
    order = [3, 0, 4, 2, 1]
    straight, shuffled = fit(RATES, losses, BASE), fit(RATES[order], losses[order], BASE)
    scaled = fit(100 * RATES, losses, 100 * BASE)
    assert shuffled.rates == straight.rates and shuffled.losses == straight.losses
    assert shuffled.optimum == pytest.approx(straight.optimum, rel=1e-12)
    assert scaled.optimum == pytest.approx(100 * straight.optimum, rel=1e-12)
    assert scaled.regret == pytest.approx(straight.regret, rel=1e-9)


def test_only_the_lowest_rate_and_two_on_each_side_are_fitted():
    """Far points that are no parabola change nothing; numpy's polynomial through the five says the same."""
    factors = np.geomspace(1 / 8, 8, 13)
    rates = BASE * factors
    losses = 3 + 0.1 * np.log(factors / 1.2) ** 2
    losses[np.abs(np.log(factors)) > 1] += 5.0
    curve = fit(rates, losses, BASE)
    lowest = int(losses.argmin())
    five = slice(lowest - 2, lowest + 3)
    c2, c1, c0 = np.polyfit(np.log(factors[five]), losses[five], 2)
    assert curve.optimum == pytest.approx(BASE * math.exp(-c1 / (2 * c2)), rel=1e-9)
    assert curve.loss == pytest.approx(c0 - c1**2 / (4 * c2), rel=1e-12)
    assert curve.window == (rates[lowest - 2], rates[lowest + 2])


def test_a_noisy_curve_lies_within_its_own_error_bars_as_often_as_it_should():
    """±2 standard errors hold the truth in 95 % of draws; 40 runs leave 37 degrees of freedom, 600 draws ±0.9 %.

    The regret of 0.0064 nats is five of its own standard errors, so that its first order is good enough.
    """
    rng = np.random.default_rng(0)
    optimum = BASE * math.exp(0.8 * math.log(1.4))
    rates, clean = np.tile(RATES, 8), np.tile(parabola(optimum), 8)
    regret = 0.1 * math.log(BASE / optimum) ** 2
    near = {"optimum": 0, "regret": 0}
    for _ in range(600):
        curve = fit(rates, clean + rng.normal(0, 0.005, len(rates)), BASE)
        near["optimum"] += abs(math.log(curve.optimum / optimum)) < 2 * curve.optimum_error
        near["regret"] += abs(curve.regret - regret) < 2 * curve.regret_error
    assert 0.92 < near["optimum"] / 600 < 0.98
    assert 0.90 < near["regret"] / 600 < 0.98


def test_the_error_bars_are_those_of_numpys_covariance_to_first_order():
    """Five points, two degrees of freedom; slopes of −c1/(2·c2) and c1²/(4·c2) by central differences."""
    losses = parabola(0.016) + np.array([0.003, -0.002, 0.001, 0.004, -0.001])
    curve = fit(RATES, losses, BASE)
    best, covariance = np.polyfit(np.log(FACTORS), losses, 2, cov=True)

    def error(function):
        steps = 1e-6 * np.eye(3)
        slope = np.array([(function(best + h) - function(best - h)) / 2e-6 for h in steps])
        return math.sqrt(slope @ covariance @ slope)

    assert curve.optimum_error == pytest.approx(error(lambda c: -c[1] / (2 * c[0])), rel=1e-6)
    assert curve.regret_error == pytest.approx(error(lambda c: c[1] ** 2 / (4 * c[0])), rel=1e-6)
    assert fit(RATES[1:4], losses[1:4], BASE).optimum_error is None


@pytest.mark.parametrize(
    ("optimum", "edge"),
    [(BASE / 10, "lower"), (BASE * 10, "upper"), (BASE * 0.51, "lower"), (BASE * 1.95, "upper")],
)
def test_a_lowest_loss_at_the_edge_is_flagged_and_not_extrapolated(optimum, edge):
    """Also where the parabola's vertex would lie just inside: nothing beyond the edge was tried."""
    losses = parabola(optimum)
    curve = fit(RATES, losses, BASE)
    assert (curve.optimum, curve.loss, curve.regret) == (None, None, None)
    assert curve.edge == edge and curve.reason == f"at the {edge} edge: widen the factors"
    assert curve.measured_regret == losses[2] - losses.min() > 0


def test_a_vertex_outside_the_rates_is_an_edge_though_the_lowest_loss_is_inside():
    """Falling with a dent: numpy's least squares through the last four has its vertex above the last rate."""
    losses = np.array([1.4, 1.25, 1.2, 0.999, 1.0])
    c2, c1, _ = np.polyfit(np.log(FACTORS[1:]), losses[1:], 2)
    assert c2 > 0 and -c1 / (2 * c2) > math.log(2)
    curve = fit(RATES, losses, BASE)
    assert (curve.optimum, curve.regret, curve.edge) == (None, None, "upper")
    assert curve.coefficients is not None


def test_ties_are_settled_by_the_rate_nearest_the_middle():
    """A symmetric curve has its vertex in its middle; of two equal ones at the edge the inner one is a minimum."""
    assert fit([1, 2, 4, 8], [3, 2, 2, 3], 1.0).optimum == pytest.approx(2**1.5, rel=1e-9)
    for losses, side in (([2, 2, 3, 4], (1, 2)), ([4, 3, 2, 2], (4, 8))):
        curve = fit([1, 2, 4, 8], losses, 1.0)
        assert curve.edge is None and side[0] < curve.optimum < side[1]


@pytest.mark.parametrize("losses", [[3.0] * 5, [3.0, 3.1, 2.99, 3.1, 3.0]])
def test_a_flat_or_hilly_curve_has_no_optimum(losses):
    curve = fit(RATES, losses, BASE)
    assert curve.optimum is None and "not convex" in curve.reason


def test_a_diverged_rate_is_left_out_and_named():
    """The rest of an exact parabola still gives it; a rate of which one seed diverged is out as a whole."""
    losses = parabola(0.011)
    losses[4] = math.nan
    curve = fit(RATES, losses, BASE)
    assert curve.diverged == (RATES[4],)
    assert curve.optimum == pytest.approx(0.011, rel=1e-10)

    both = np.concatenate([parabola(0.011), parabola(0.011)])
    both[9] = math.inf
    half = fit(np.tile(RATES, 2), both, BASE)
    assert half.diverged == (RATES[4],) and half.rates == tuple(RATES[:4]) and half.runs == 10


def test_an_optimum_next_to_a_diverged_rate_asks_for_rates_between():
    losses = parabola(0.04)
    losses[4] = math.nan
    curve = fit(RATES, losses, BASE)
    assert curve.edge == "upper" and "next to a diverged rate: add factors between" in curve.reason
    other_side = parabola(0.04)
    other_side[0] = math.nan
    assert "widen" in fit(RATES, other_side, BASE).reason


def test_a_base_rate_that_diverged_has_no_regret():
    losses = parabola(0.008)
    losses[2:] = math.nan
    few = fit(RATES, losses, BASE)
    assert few.optimum is few.regret is few.measured_regret is None
    assert few.reason == "2 rates did not diverge: a parabola needs 3"
    assert "does not transfer to r = 1, width 64, 10 tokens per parameter (it diverged)" in verdict(
        "lr", {A: few}
    )
    assert fit(RATES, [math.nan] * 5, BASE).rates == ()


def test_a_base_rate_beyond_the_parabola_is_judged_by_its_measured_loss():
    """Optimum four rates above the base: its loss there is measured, not read off the parabola, and may be anything."""
    factors = 1.4 ** np.arange(8)
    losses = 3 + 0.1 * (np.arange(8) - 5.2) ** 2
    losses[0] = 9.0
    curve = fit(factors, losses, 1.0)
    assert curve.loss == pytest.approx(3.0, rel=1e-9)
    assert curve.regret == pytest.approx(6.0, rel=1e-9) and curve.regret_error is None


def test_regret_is_not_negative_where_the_base_rate_was_the_best_one_measured():
    """By the method: the base is 0.01 nats below the parabola through its neighbours, its regret still not below 0."""
    losses = parabola(0.016)
    losses[2] -= 0.01
    curve = fit(RATES, losses, BASE)
    assert curve.measured_regret == 0.0 and curve.regret > 0


def test_noise_is_the_spread_between_seeds_at_one_rate():
    """Three seeds shifted by −0.01, 0, 0.01: their standard deviation is 0.01, and the curve is the middle one's."""
    shifts = np.repeat([-0.01, 0.0, 0.01], 5)
    clean = parabola(0.011)
    curve = fit(np.tile(RATES, 3), np.tile(clean, 3) + shifts, BASE)
    assert curve.seed_sd == pytest.approx(0.01, rel=1e-9)
    assert curve.optimum == pytest.approx(0.011, rel=1e-9)
    assert curve.losses == pytest.approx(tuple(clean), rel=1e-12)
    assert curve.regret == pytest.approx(0.1 * math.log(BASE / 0.011) ** 2, rel=1e-6)
    assert curve.above_noise is False  # 0.0058
    assert fit(np.tile(RATES, 3), np.tile(parabola(0.0085), 3) + shifts, BASE).above_noise is True
    single = fit(RATES, clean, BASE)
    assert single.seed_sd is None and single.above_noise is None


def test_the_verdict_names_the_largest_regret_or_where_the_rate_does_not_transfer():
    good, better = fit(RATES, parabola(0.012), BASE), fit(RATES, parabola(0.0138), BASE)
    bad, edge = fit(RATES, parabola(0.0225), BASE), fit(RATES, parabola(0.5), BASE)
    flat = fit(RATES, [3.0] * 5, BASE)
    assert 0 < good.regret < TOLERANCE < bad.regret
    assert verdict("lr", {A: good, B: better}) == (
        f"lr = 0.014 transfers within {good.regret:.3f} nats over 2 of 2 conditions (largest regret: r = 1, width 64, "
        "10 tokens per parameter)."
    )
    text = verdict("lr", {A: good, B: bad})
    assert (
        f"does not transfer to r = 4, width 32, 5 tokens per parameter (regret {bad.regret:.3f} nats, "
        in text
    )
    assert "optimum 0.0225)" in text and "over 1 of 2 conditions" in text
    assert f"regret at least {edge.measured_regret:.3f} nats, at the upper edge" in verdict(
        "lr", {A: edge}
    )
    assert verdict("lr", {A: flat}).startswith("lr = 0.014 is open at r = 1, width 64, ")
    noisy = replace(bad, seed_sd=0.1)
    assert "does not" not in verdict("lr", {A: noisy})


def test_the_table_has_a_row_a_condition_with_what_was_fitted():
    curves = {A: fit(RATES, parabola(0.012), BASE), B: fit(RATES, parabola(0.5), BASE)}
    stream = io.StringIO()
    Console(file=stream, width=160).print(curve_table("optimizer.muonh_lr", curves))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("│")]
    assert len(lines) == 2
    assert " 0.012 ×/÷1.00 " in lines[0] and f"{curves[A].regret:.4f} ± 0.0000" in lines[0]
    assert "│ – │" in " ".join(lines[1].split()) and "at the upper edge" in lines[1]
