"""Equivalent sizes: the paper's example G.5 under each split, and every way of naming a model."""

import numpy as np
import pytest

from scaling.optima.frontier import architectures
from scaling.optima.sizes import EquivalentSize, equivalent_size
from scaling.runs.table import RunTable
from scaling.solver.laws import JointLaw

LAW = JointLaw(E=1.57, A=28.0, alpha=0.199, B=916.0, beta=0.369, phi=0.46)


def of(frame, split="regression"):
    return architectures(RunTable.of(frame, split=split).runs)[0]


@pytest.mark.parametrize(
    ("split", "n_eff"),
    [("without", 0.578), ("regression", 0.585), ("text", 0.594)],
)
def test_a_looped_model_as_wide_as_one_billion_unlooped_parameters(paper, split, n_eff):
    """G.5: 0.41 B parameters, N_eff about 0.58 B at φ = 0.46; the split decides the third digit."""
    if split == "without":  # the injection left out of N_rec
        frame = paper.assign(n_rec=paper["n_rec"] - paper["n_injection"])
        found = of(frame, "text")
    else:
        found = of(paper, split)
    one = equivalent_size(LAW, found, 4, n_unlooped=1e9)
    assert one.n == pytest.approx(0.41e9, abs=0.011e9)  # 0.400 B without the injection
    assert one.n_eff == pytest.approx(n_eff * 1e9, abs=6e5)  # three digits
    assert one.hidden_size == pytest.approx(np.sqrt(1e9 / 240), rel=1e-9)  # 20 blocks of 12·d²
    assert one.n_unlooped == pytest.approx(1e9, rel=1e-9) and not one.extrapolated


def test_every_way_of_naming_a_model_gives_the_same_one(paper):
    found = of(paper)
    first = equivalent_size(LAW, found, 8, hidden_size=1024.0)
    for name in ("n_unlooped", "n", "n_eff"):
        again = equivalent_size(LAW, found, 8, **{name: getattr(first, name)})
        for field in ("hidden_size", "n_unlooped", "n", "n_eff"):
            # a square root and a sum: a few roundings
            assert getattr(again, field) == pytest.approx(getattr(first, field), rel=1e-12)


def test_the_unlooped_model_of_n_eff_parameters_has_the_looped_ones_loss(paper):
    one = equivalent_size(LAW, of(paper), 4, hidden_size=1024.0)
    looped = next(found for found in of(paper) if found.r == 4)
    unlooped_loss = LAW.loss(one.n_eff, 0.0, 1.0, 2e9)
    assert float(looped.loss(LAW, 1024.0, 2e9)) == pytest.approx(unlooped_loss, rel=1e-12)


def test_shares_are_those_of_the_counts(paper):
    one = equivalent_size(LAW, of(paper, "text"), 4, hidden_size=640.0)
    assert one.saved == pytest.approx(1 - 98 / 240)  # blocks of d²: 4 + 4 of 12, injection 2
    assert one.kept == pytest.approx((48 + 50 * 4**0.46) / 240)


def test_without_an_unlooped_model_the_rest_is_still_given(make_grid, known_law):
    found = of(make_grid(known_law, rs=(2, 4)), "text")
    one = equivalent_size(known_law, found, 2, hidden_size=96.0)
    assert one.n_unlooped is None and one.saved is None and one.kept is None
    assert "no unlooped model" in one.reason
    assert one.n == pytest.approx((48 + 96) * 96**2)
    with pytest.raises(ValueError, match="n_unlooped is given.*no unlooped partner of r = 2"):
        equivalent_size(known_law, found, 2, n_unlooped=1e6)


def test_a_width_outside_the_table_is_said(paper):
    assert equivalent_size(LAW, of(paper), 4, n_unlooped=1e11).extrapolated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no size given, but exactly one of hidden_size, n_unlooped, n, n_eff"),
        ({"n": 1e9, "n_eff": 1e9}, "n, n_eff given, but exactly one"),
        ({"n": -1.0}, r"n is -1.0, but must be positive"),
        ({"hidden_size": float("nan")}, "hidden_size is nan, but must be positive"),
        ({"n": 1e9, "effective_depth": 18.0}, "r = 4, effective depth 18 names 0"),
    ],
)
def test_what_fixes_no_model_is_refused(paper, arguments, message):
    with pytest.raises(ValueError, match=message):
        equivalent_size(LAW, of(paper), 4, **arguments)


def test_an_r_that_the_table_lacks_is_refused(paper):
    with pytest.raises(
        ValueError, match=r"r = 3 names 0 of the table's architectures \(r = 1, eff"
    ):
        equivalent_size(LAW, of(paper), 3, n=1e9)


def test_results_come_back_from_their_json(paper):
    one = equivalent_size(LAW, of(paper), 4, n=1e8)
    assert EquivalentSize.from_json(one.to_json()) == one
