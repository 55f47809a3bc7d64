"""Results go to JSON and come back bit for bit."""

import json

import numpy as np
import pandas as pd
import pytest

import scaling
from scaling.record import plain


def same(one, other):
    """Equal in every bit, tables and arrays included; NaN equals NaN."""
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other, check_exact=True, check_dtype=False)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, tuple):
        assert isinstance(other, tuple) and len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            same(first, second)
    elif hasattr(one, "__dataclass_fields__"):
        assert type(one) is type(other)
        for name in one.__dataclass_fields__:
            same(getattr(one, name), getattr(other, name))
    elif isinstance(one, float) and np.isnan(one):
        assert np.isnan(other)
    else:
        assert one == other and type(one) is type(other)


def test_fits_and_intervals_come_back_bit_for_bit(make_grid, known_law):
    grid = make_grid(known_law, noise=0.01)
    grid["status"] = "finished"
    grid.loc[0, "status"] = "diverged"
    joint = scaling.fit_joint(grid, n_starts=10)
    chinchilla = scaling.fit_chinchilla(grid, n_starts=10)
    for result in (joint, chinchilla, scaling.bootstrap(joint, resamples=5)):
        same(result, type(result).from_json(result.to_json()))


def test_what_json_lacks_survives_the_round_trip_and_is_null_for_readers(make_grid, known_law):
    fit = scaling.fit_joint(make_grid(known_law, noise=0.01), n_starts=10)
    odd = type(fit)(**{**fit.__dict__, "r2": float("nan"), "condition": float("inf")})
    back = scaling.JointFit.from_json(odd.to_json())
    assert np.isnan(back.r2) and back.condition == float("inf")
    assert plain(odd)["r2"] is None and plain(odd)["condition"] is None
    json.dumps(plain(odd), allow_nan=False)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"law": 3}', "null"])
def test_other_text_is_refused_by_name(text):
    with pytest.raises(ValueError, match="holds no JointFit"):
        scaling.JointFit.from_json(text)
