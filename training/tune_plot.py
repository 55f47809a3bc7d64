"""Figure of a learning-rate sweep: regret against base rate, widths on the left, horizons on the right."""

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .curves import Condition, UCurve

# Okabe and Ito's palette, which colour-blind readers can tell apart; every r has its own marker and line.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS, LINES = ("o", "s", "^", "D", "v"), ("-", "--", ":", "-.")


def sweep_figure(
    curves: Mapping[Condition, UCurve], reference: tuple[int, float], name: str
) -> Figure:
    """Draw the curves in two panels; `reference` is the width and the horizon that the panels hold fixed.

    A curve without an optimum has its regret above its lowest loss, and no line.
    """
    width, horizon = reference
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(
        left,
        {c: curve for c, curve in curves.items() if c.tokens_per_parameter == horizon},
        "hidden_size",
        "width {:g}",
    )
    _panel(
        right,
        {c: curve for c, curve in curves.items() if c.hidden_size == width},
        "tokens_per_parameter",
        "{:g} tokens per parameter",
    )
    left.set_title(f"Widths, {horizon:g} tokens per parameter")
    right.set_title(f"Horizons, width {width}")
    left.set_ylabel("regret, nats per token")
    for axis in (left, right):
        axis.set_xlabel(f"base rate {name}")
    return figure


def _panel(axis: Axes, curves: Mapping[Condition, UCurve], varied: str, label: str) -> None:
    """Draw one panel: colours for what varies, markers and lines for r; crosses on top are diverged rates."""
    values = sorted({getattr(condition, varied) for condition in curves})
    recurrences = sorted({condition.recurrences for condition in curves})
    for condition, curve in curves.items():
        value, r = getattr(condition, varied), condition.recurrences
        colour = COLOURS[values.index(value) % len(COLOURS)]
        shape = recurrences.index(r)
        axis.plot(
            curve.diverged,
            [0.97] * len(curve.diverged),
            "x",
            color=colour,
            transform=axis.get_xaxis_transform(),
        )
        if not curve.losses:
            continue
        zero = min(curve.losses) if curve.loss is None else curve.loss
        axis.plot(
            curve.rates,
            np.array(curve.losses) - zero,
            MARKERS[shape % len(MARKERS)],
            color=colour,
            label=f"r = {r}, {label.format(value)}" + ("" if curve.loss is not None else " *"),
        )
        if curve.loss is not None and curve.window and curve.coefficients:
            first, last = (math.log(rate / curve.base) for rate in curve.window)
            u = np.linspace(first, last, 100)
            loss = np.polyval(curve.coefficients[::-1], u)
            line = LINES[shape % len(LINES)]
            axis.plot(curve.base * np.exp(u), loss - zero, line, color=colour, linewidth=1)
    axis.set_xscale("log")
    axis.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    if not curves:
        axis.text(0.5, 0.5, "no curve", ha="center", transform=axis.transAxes)
        return
    base = next(iter(curves.values())).base
    axis.axvline(base, color="0.4", linestyle="--", linewidth=1, label=f"base rate {base:g}")
    if any(curve.loss is None for curve in curves.values()):
        axis.plot([], [], " ", label="* no optimum: above the lowest loss")
    axis.legend(fontsize=7)
