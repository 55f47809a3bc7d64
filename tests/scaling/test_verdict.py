"""The verdict's sentences for given numbers."""

from dataclasses import replace

import pytest

from scaling.comparison.consequences import Consequences, Effect, Estimate
from scaling.comparison.difference import Difference
from scaling.comparison.verdict import verdict

NOTHING = Estimate(value=None, low=None, high=None)


def about(value, half):
    return Estimate(value=value, low=value - half, high=value + half)


def difference(low, high):
    return Difference(
        delta_phi=(low + high) / 2,
        delta_phi_ci=(low, high),
        phi_baseline=0.45,
        phi_baseline_ci=(0.4, 0.5),
        phi_variant=0.45 + (low + high) / 2,
        phi_variant_ci=(0.4, 0.5),
        p_positive=0.5,
        paired=True,
        pairing="paired",
        n_cells=(16, 16),
        n_resamples=200,
        n_redrawn=0,
        n_at_bound=0,
        seed=0,
        reason=None,
        draws=(low, high),
    )


def meaning(loss, capacity, tokens):
    """Consequences at one budget with given changes of the loss, each known to ± 0.001 nats."""
    overall = {
        "loss_change": about(loss, 0.001),
        "capacity_part": about(capacity, 0.001),
        "token_part": about(tokens, 0.001),
        "width": about(1.1, 0.05),
        "inference_flops": about(1.2, 0.1),
        "equal_loss_inference_flops": about(1.02, 0.1),
    }
    names = Effect.__dataclass_fields__
    effect = Effect(**{**dict.fromkeys(names, NOTHING), "budget_flops": 1e18, "r": 4})
    return Consequences(capacity=(), effects=(effect,), overall=overall, basis=(), unavailable=())


def says(value, *parts, shared=None, identical=False):
    return verdict(value, shared, meaning(*(parts or (0.0, 0.0, 0.0))), identical=identical)


@pytest.mark.parametrize(
    ("low", "high", "start"),
    [
        (0.05, 0.15, "A recurrence is worth more in the variant"),
        (-0.15, -0.05, "A recurrence is worth less in the variant"),
        (-0.05, 0.15, "Cannot tell whether a recurrence is worth more or less"),
        (0.0, 0.1, "Cannot tell"),
    ],
)
def test_the_side_of_zero_on_which_the_interval_lies_decides(low, high, start):
    assert says(difference(low, high)).startswith(start)


def test_a_missing_interval_or_a_bound_or_the_shared_cells_leave_it_open():
    clear = difference(0.05, 0.15)
    missing = replace(clear, delta_phi_ci=None, reason="only 2 (budget, r) cells")
    assert "only 2 (budget, r) cells" in says(missing)
    assert says(missing).startswith("Cannot tell")
    stopped = replace(clear, n_at_bound=20)
    assert "stopped on its bound in 20 of 200 resamples" in says(stopped)
    assert says(clear, shared=difference(-0.05, 0.15)).startswith("Cannot tell")
    assert says(clear, shared=difference(0.02, 0.15)).startswith("A recurrence is worth more")


def test_the_source_of_a_change_of_loss_is_named_only_where_its_interval_says_so():
    clear = difference(-0.15, -0.05)
    assert "cheaper training tokens hide a loss of capacity" in says(clear, -0.03, 0.01, -0.04)
    assert "it comes from the tokens alone" in says(clear, -0.03, 0.0005, -0.0305)
    assert "it is a gain of capacity" in says(clear, -0.03, -0.03, 0.0)
    assert "it is a loss of capacity" in says(clear, 0.03, 0.03, 0.0)
    open_part = meaning(-0.008, -0.004, -0.004)
    open_part.overall["capacity_part"] = about(-0.004, 0.01)  # may be most of it, may be none
    text = verdict(clear, None, open_part, identical=False)
    assert "only the part from tokens is certain" in text and "alone" not in text
    assert "the best loss (r = 4) falls" in text
    unlooped = replace(open_part.effects[0], r=1)  # its own r = 1 runs have no part in the mean
    both = replace(open_part, effects=(unlooped, *open_part.effects))
    assert "the best loss (r = 4) falls" in verdict(clear, None, both, identical=False)
    both = says(clear, -0.03, -0.02, -0.01)
    assert "falls by 0.0300 nats [0.0290, 0.0310]" in both
    assert "alone" not in both
    assert "may be higher or lower" in says(clear, 0.0005, 0.0, 0.0)


def test_an_open_direction_of_serving_costs_is_called_open():
    text = says(difference(0.05, 0.15))
    assert "width changes by +10.0 % [+5.0, +15.0] and" in text
    assert "by +2.0 % [-8.0, +12.0] (direction open) at equal loss" in text
