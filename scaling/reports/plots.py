"""Figures of one analysis: iso-FLOPs curves, frontier against compute, predicted against observed.

Every function returns a `Figure` without touching pyplot's global state; `save` writes it. Colours
are Okabe and Ito's palette, which colour-blind readers can tell apart; every r also has its own
marker.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..optima.frontier import frontier
from ..optima.isoflops import IsoFlopsMinimum
from .analysis import Analysis

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DPI = 150


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as PNG (150 dpi) or SVG, by extension; readers see the old file or the new one.

    Never half of it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        FigureCanvasAgg(figure)
        figure.savefig(temporary, format=path.suffix[1:], dpi=_DPI)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def isoflops_figure(analysis: Analysis) -> Figure:
    """One panel a budget: loss against N for every r, the parabolas and their minima (stars).

    A cell whose minimum is not determined keeps its points and has its parabola dotted, without a
    star.
    """
    budgets = analysis.budgets()
    columns = min(3, max(1, len(budgets)))
    rows = max(1, math.ceil(len(budgets) / columns))
    figure = _figure(4.0 * columns + 0.4, 3.1 * rows + 0.9)
    if not budgets:
        _say(figure.add_subplot(), "No iso-FLOPs curves: the table has no budget_flops")
        return figure
    axes = figure.subplots(rows, columns, squeeze=False)
    styles = _styles(analysis)
    runs = analysis.fit.runs
    for axis, budget in zip(axes.ravel(), budgets, strict=False):
        for r, (colour, marker) in styles.items():
            cell = runs[(runs["budget_flops"] == budget) & (runs["r"] == r)]
            if len(cell):
                axis.plot(
                    cell["n"],
                    cell["loss"],
                    marker,
                    color=colour,
                    markersize=5,
                    alpha=0.85,
                    label=f"r = {r}",
                )
        for minimum in analysis.minima:
            if minimum.budget_flops == budget:
                _parabola(axis, minimum, runs, styles[minimum.r][0])
        axis.set_title(f"C = {_power(budget)} FLOPs", fontsize=10)
        _count_axis(axis)
        _finish(axis)
    for axis in axes.ravel()[len(budgets) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("Loss (nats per token)")
    for column in range(columns):
        shown = [axis for axis in axes[:, column] if axis.get_visible()]
        shown[-1].set_xlabel("Parameters N = N_once + N_rec")
    handles = [
        Line2D([], [], color=c, marker=m, markersize=5, label=f"r = {r}")
        for r, (c, m) in styles.items()
    ]
    handles.append(
        Line2D(
            [], [], color="0.25", marker="*", linestyle="", markersize=11, label="parabola minimum"
        )
    )
    if any(one.reason and one.coefficients for one in analysis.minima):
        handles.append(Line2D([], [], color="0.25", linestyle=":", label="minimum not determined"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 3 * columns),
        frameon=False,
    )
    return figure


def _parabola(axis: Axes, minimum: IsoFlopsMinimum, runs: pd.DataFrame, colour: str) -> None:
    if minimum.coefficients is None:
        return
    c0, c1, c2 = minimum.coefficients
    cell = runs[(runs["budget_flops"] == minimum.budget_flops) & (runs["r"] == minimum.r)]
    log_n = np.linspace(np.log(cell["n"].min()) - 0.05, np.log(cell["n"].max()) + 0.05, 100)
    u = log_n - np.log(minimum.centre)
    style = "-" if minimum.n is not None else ":"
    axis.plot(np.exp(log_n), c0 + c1 * u + c2 * u**2, style, color=colour, linewidth=1.3)
    if minimum.n is not None and minimum.loss is not None:
        axis.plot(
            minimum.n,
            minimum.loss,
            "*",
            color=colour,
            markersize=12,
            markeredgecolor="black",
            markeredgewidth=0.6,
            zorder=5,
        )


def frontier_figure(analysis: Analysis) -> Figure:
    """Left: smallest loss against compute for every r. Right: its distance to the smallest r.

    Solid: the fitted law; dashed: the law refitted with φ = 1, under which looped and unlooped
    models nearly coincide (the fitted law with φ = 1 where a refit is not possible); markers:
    parabola minima.
    """
    figure = _figure(10.4, 4.9)
    budgets = analysis.budgets()
    if not budgets or not analysis.architectures:
        reason = next(iter(analysis.frontier_reasons.values()), "the table has no budget_flops")
        _say(figure.add_subplot(), f"No frontier: {reason}")
        return figure
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.06})
    styles = _styles(analysis)
    compute = np.geomspace(budgets[0] / 1.3, budgets[-1] * 1.3, 25)
    found = analysis.architectures
    base = found[0].r
    held = analysis.restricted[1].law if 1 in analysis.restricted else None
    full_worth = held or replace(analysis.fit.law, phi=1.0)
    for style, law, width in (("-", analysis.fit.law, 1.8), ("--", full_worth, 1.2)):
        curves = frontier(law, found, compute)
        reference = curves.loc[curves["r"] == base, "loss"].to_numpy()
        for one in found:
            loss = curves.loc[curves["r"] == one.r, "loss"].to_numpy()
            left.plot(compute, loss, style, color=styles[one.r][0], linewidth=width)
            if one.r != base:
                right.plot(
                    compute, loss - reference, style, color=styles[one.r][0], linewidth=width
                )
    hollow = _frontier_points(analysis, left, right, base)
    left.set_ylabel("Compute-optimal loss (nats per token)")
    right.set_ylabel(f"Loss above r = {base} at equal compute (nats)")
    right.axhline(0.0, color=styles[base][0], linewidth=1.0)
    for axis in (left, right):
        _compute_axis(axis, budgets)
        _finish(axis)
    _frontier_legend(figure, analysis, hollow=hollow, refitted=held is not None)
    figure.suptitle(_phi_title(analysis), fontsize=11)
    return figure


def _frontier_legend(figure: Figure, analysis: Analysis, *, hollow: bool, refitted: bool) -> None:
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=6, label=f"r = {r}")
        for r, (colour, marker) in _styles(analysis).items()
    ]
    handles += [
        Line2D([], [], color="0.25", label=f"law, φ = {analysis.phi:.3f}"),
        Line2D(
            [],
            [],
            color="0.25",
            linestyle="--",
            label="refit with φ = 1" if refitted else "same law, φ = 1",
        ),
    ]
    for face, label, present in (
        ("0.25", "parabola minimum", any(one.loss is not None for one in analysis.minima)),
        ("none", "best run (no minimum)", hollow),
    ):
        if present:
            handles.append(
                Line2D(
                    [],
                    [],
                    color="0.25",
                    marker="o",
                    markerfacecolor=face,
                    linestyle="",
                    label=label,
                )
            )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / 2) if hollow or len(handles) > 7 else len(handles),
        frameon=False,
    )


def _frontier_points(analysis: Analysis, left: Axes, right: Axes, base: int) -> bool:
    """Mark each cell's parabola minimum, or hollow its best run; true with hollow ones."""
    runs, styles = analysis.fit.runs, _styles(analysis)
    best = runs.groupby(["budget_flops", "r", "n"])["loss"].mean().groupby(level=[0, 1]).min()
    points: dict[tuple[float, int], tuple[float, bool]] = {}
    for one in analysis.minima:
        cell = (one.budget_flops, one.r)
        found = one.loss is not None
        points[cell] = (float(one.loss if one.loss is not None else best[cell]), found)
    for (budget, r), (loss, found) in points.items():
        colour, marker = styles[r]
        face = colour if found else "none"
        left.plot(budget, loss, marker, color=colour, markersize=6, markerfacecolor=face)
        if r != base and (budget, base) in points:
            reference, both = points[budget, base]
            face = colour if found and both else "none"
            right.plot(
                budget, loss - reference, marker, color=colour, markersize=6, markerfacecolor=face
            )
    return not all(found for _, found in points.values())


def predicted_figure(analysis: Analysis) -> Figure:
    """Left: predicted against observed loss, with the diagonal.

    Right: residuals against observed loss.
    """
    figure = _figure(10.4, 4.6)
    left, right = figure.subplots(1, 2)
    runs = analysis.fit.runs
    for r, (colour, marker) in _styles(analysis).items():
        group = runs[runs["r"] == r]
        options = {"color": colour, "markersize": 5, "alpha": 0.85, "label": f"r = {r}"}
        left.plot(group["loss"], group["predicted"], marker, **options)
        right.plot(group["loss"], group["residual"], marker, **options)
    ends = [
        min(runs["loss"].min(), runs["predicted"].min()),
        max(runs["loss"].max(), runs["predicted"].max()),
    ]
    left.plot(ends, ends, color="0.4", linewidth=1.0, zorder=1, label="equal")
    right.axhline(0.0, color="0.4", linewidth=1.0, zorder=1)
    left.set_ylabel("Predicted loss (nats per token)")
    right.set_ylabel("Observed − predicted (nats)")
    for axis in (left, right):
        axis.set_xlabel("Observed loss (nats per token)")
        _finish(axis)
    left.legend(frameon=False)
    figure.suptitle(
        f"{_phi_title(analysis)}   R² = {analysis.fit.r2:.4f}   RMSE = {analysis.fit.rmse:.4f} "
        "nats   "
        f"{analysis.fit.n_runs} runs",
        fontsize=11,
    )
    return figure


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _styles(analysis: Analysis) -> dict[int, tuple[str, str]]:
    rs = [row.r for row in analysis.fit.residuals]
    return {r: (_COLOURS[k % len(_COLOURS)], _MARKERS[k % len(_MARKERS)]) for k, r in enumerate(rs)}


def _phi_title(analysis: Analysis) -> str:
    interval = analysis.phi_ci
    ends = f"  [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return f"φ = {analysis.phi:.3f}{ends}   split: {analysis.fit.split}"


def _count_axis(axis: Axes) -> None:
    """Logarithmic axis of counts with a few round labels such as 20 M."""
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 3.0, 5.0) if decades < 1 else (1.0, 3.0) if decades < 1.8 else (1.0,)
    axis.xaxis.set_major_locator(LogLocator(subs=subs))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.xaxis.set_minor_locator(NullLocator())


def _compute_axis(axis: Axes, budgets: list[float]) -> None:
    """Logarithmic axis of compute, labelled at the budgets themselves where they are few."""
    axis.set_xscale("log")
    axis.set_xlabel("Training compute C (FLOPs)")
    axis.xaxis.set_minor_formatter(NullFormatter())
    if len(budgets) <= 6:
        axis.xaxis.set_major_locator(FixedLocator(budgets))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
        axis.tick_params(axis="x", labelsize=8)


def _short(value: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.999:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def _power(value: float) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    mantissa = value / 10**exponent
    power = rf"10^{{{exponent}}}"
    return f"${power}$" if abs(mantissa - 1) < 5e-3 else rf"${mantissa:.3g}\times {power}$"


def _say(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", wrap=True, transform=axis.transAxes)
    axis.set_axis_off()


def _finish(axis: Axes) -> None:
    axis.grid(True, color="0.9", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
