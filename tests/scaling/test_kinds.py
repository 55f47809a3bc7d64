"""What counts as one architecture of a table."""

import numpy as np
import pandas as pd
import pytest

from scaling.runs.kinds import by_architecture, effective_depths


@pytest.fixture
def runs():
    widths, rs = (64, 96, 128), (1, 4)
    return pd.DataFrame([{"r": r, "hidden_size": d} for r in rs for d in widths])


def keys(runs):
    return [(r, depth, len(group)) for r, depth, group in by_architecture(runs)]


def test_without_depths_every_r_is_one(runs):
    assert keys(runs) == [(1, None, 3), (4, None, 3)]


def test_one_depth_is_named_and_divides_nothing(runs):
    assert keys(runs.assign(effective_depth=20)) == [(1, 20.0, 3), (4, 20.0, 3)]
    assert effective_depths(runs.assign(effective_depth=20)) == []


def test_several_depths_at_a_width_are_several(runs):
    both = pd.concat([runs.assign(effective_depth=depth) for depth in (24, 18)])
    assert keys(both) == [(1, 18.0, 3), (1, 24.0, 3), (4, 18.0, 3), (4, 24.0, 3)]
    assert effective_depths(both) == [18.0, 24.0]


def test_a_depth_of_each_width_divides_nothing(runs):
    deeper = runs.assign(effective_depth=runs["hidden_size"] // 4)
    assert keys(deeper) == [(1, None, 3), (4, None, 3)]


def test_depths_that_differ_between_r_alone_divide_nothing(runs):
    """Iso-parameter designs: every r executes another number of layers, one architecture each."""
    iso = runs.assign(effective_depth=4 * runs["r"])
    assert keys(iso) == [(1, 4.0, 3), (4, 16.0, 3)]


def test_unknown_depths_stay_together(runs):
    assert keys(runs.assign(effective_depth=np.nan)) == [(1, None, 3), (4, None, 3)]
