"""What the laws say by their form."""

from dataclasses import replace

import pytest

from scaling.solver.laws import Chinchilla, JointLaw


def test_phi_one_makes_iso_flops_architectures_equal(known_law):
    """With φ = 1 a looped model counts as the unlooped one that executes the same layers (3.2)."""
    law = replace(known_law, phi=1.0)
    for d in (384, 640, 2176):
        unlooped = law.loss(48 * d**2, 192 * d**2, 1, 1e9)
        looped = law.loss(48 * d**2, 48 * d**2, 4, 1e9)
        assert looped == pytest.approx(unlooped, rel=1e-12)  # same sum, different order of rounding


def test_phi_zero_makes_recurrences_worthless(known_law):
    law = replace(known_law, phi=0.0)
    assert law.loss(1e7, 1e7, 8, 1e9) == law.loss(1e7, 1e7, 1, 1e9)


def test_without_recurrence_the_joint_law_is_chinchilla(known_law):
    plain = Chinchilla(
        **{name: getattr(known_law, name) for name in ("E", "A", "alpha", "B", "beta")}
    )
    assert known_law.loss(1e7, 2e7, 1, 1e9) == plain.loss(3e7, 1e9)


@pytest.mark.parametrize(
    ("field", "value"), [("A", 0.0), ("E", -0.1), ("beta", float("nan")), ("phi", float("inf"))]
)
def test_parameters_that_are_no_law_are_refused(field, value):
    fields = {"E": 1.5, "A": 30.0, "alpha": 0.2, "B": 900.0, "beta": 0.4, "phi": 0.5, field: value}
    with pytest.raises(ValueError, match=f"JointLaw: {field} is "):
        JointLaw(**fields)
