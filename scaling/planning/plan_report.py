"""A plan as text and as JSON: what the grid would show, what fewer runs would, and what is assumed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..record import plain
from ..text import NONE, bullets, markdown_table, wrap
from .cheapest import MIN_CELLS, Choice
from .design import PAPER_GRID, PAPER_LAW, Grid
from .forecast import Forecast
from .noise import Noise
from .planned import Plan

PUBLISHED = (0.41, 0.53)  # 95 % interval of φ, Schwethelm et al. 2026, table 2


def render_plan(plan: Plan) -> str:
    """Write the plan as Markdown."""
    parts = [
        f"# What {plan.source} would tell about {_what(plan)}",
        wrap(_assumed(plan)),
        _forecasts(plan),
        _grids(plan),
        bullets(_notes(plan)),
    ]
    return "\n\n".join(parts) + "\n"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Plain JSON values: expected width, runs and FLOPs of the grid first, then everything."""
    return {"expected_width": plan.forecast.width, **plain(plan)}


def _what(plan: Plan) -> str:
    return "φ" if plan.delta_phi is None else "Δφ"


def _assumed(plan: Plan) -> str:
    law, noise = plan.law, plan.noise
    value = f"φ = {law.phi:.3g}"
    if plan.delta_phi is not None:
        value += f", Δφ = {plan.delta_phi:+.3g}"
    return (
        f"Assumed: {value}; E {law.E:.4g}, A {law.A:.4g}, α {law.alpha:.4g}, B {law.B:.4g}, β "
        f"{law.beta:.4g}; noise {noise.run:.2g} nats of each run alone and {noise.cell:.2g} shared by "
        f"a (budget, r) cell. {plan.forecast.n_sets} synthetic tables of each grid were fitted, "
        f"{plan.forecast.n_bootstrapped} of them block-bootstrapped."
    )


def _forecasts(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [
        (plan.source, *_cost(plan.n_runs, plan.flops, plan), *_numbers(plan.grid, plan.forecast))
    ]
    for one in plan.choices:
        name = f"{one.target:.3f} wide, fewest {_unit(one)}"
        if one.grid is None or one.forecast is None or one.n_runs is None or one.flops is None:
            rows.append((name, *[NONE] * 7))
            continue
        rows.append((name, *_cost(one.n_runs, one.flops, plan), *_numbers(one.grid, one.forecast)))
    header = (
        "grid",
        "runs",
        "FLOPs",
        "share",
        "cells",
        "interval width",
        f"{_what(plan)} found in",
        "bias",
    )
    return markdown_table(header, rows)


def _unit(choice: Choice) -> str:
    return "FLOPs" if choice.minimised == "flops" else "runs"


def _cost(n_runs: int, flops: float, plan: Plan) -> tuple[str, str, str]:
    return str(n_runs), f"{flops:.3g}", f"{flops / plan.flops:.0%}"


def _numbers(grid: Grid, forecast: Forecast) -> tuple[str, str, str, str]:
    width = f"{forecast.width:.3f}"
    if forecast.expected_range is not None:
        low, high = forecast.expected_range
        width += f" ({low:.3f}–{high:.3f})"
    return (
        str(grid.n_cells),
        width,
        f"[{forecast.low:.3f}, {forecast.high:.3f}]",
        f"{forecast.bias:+.4f}",
    )


def _grids(plan: Plan) -> str:
    """Budgets, widths and r of the chosen grids; the plan's own first."""
    lines = [f"- {plan.source}: {_described(plan.grid)}"]
    seen = []
    for one in plan.choices:
        name = f"{one.target:.3f} wide, fewest {_unit(one)}"
        if one.grid is None:
            lines.append(f"- {name}: {one.reason}.")
        elif one.grid in seen:
            lines.append(f"- {name}: the same grid as above")
        else:
            seen.append(one.grid)
            lines.append(f"- {name}: {_described(one.grid)}")
    return "The grids, C in FLOPs: widths\n\n" + "\n".join(wrap(line, "  ") for line in lines)


def _described(grid: Grid) -> str:
    cells = "; ".join(
        f"{budget:.3g}: {', '.join(map(str, widths))}"
        for budget, widths in zip(grid.budgets, grid.widths, strict=True)
    )
    return f"r = {', '.join(map(str, grid.recurrences))}; {cells}"


def _notes(plan: Plan) -> list[str]:
    found = plan.forecast
    out = [
        "Interval width: the median 95 % block-bootstrap interval that such a table would report, with "
        "the 10th and 90th percentile over tables. The second interval holds 95 % of the estimates.",
    ]
    if _is_the_papers(plan):
        low, high = PUBLISHED
        out.append(
            f"The paper publishes [{low}, {high}], {high - low:.2f} wide, from these 116 runs, which "
            f"took {plan.flops:.3g} FLOPs."
        )
    if plan.delta_phi is not None:
        out.append(
            f"{found.p_sign:.0%} of the estimates have the sign of Δφ. Runs and FLOPs count both "
            "sweeps, their r = 1 runs once."
        )
    if min(grid.n_cells for grid in _all_grids(plan)) < MIN_CELLS:
        out.append(f"Percentiles over fewer than {MIN_CELLS} (budget, r) cells are rough.")
    if any(len(grid.recurrences) == 2 for grid in _all_grids(plan)):
        out.append("Two r give φ but no test of the form r^φ.")
    if plan.choices:
        out.append(
            f"Searched: {plan.choices[0].n_candidates} parts of the grid with budgets halfway between "
            "its own; those that promise enough by the large-sample formula are simulated, cheapest "
            f"first. A simulated width is good to about {_precision(plan):.0%}."
        )
        out.append(
            "The search assumes that the law holds and that φ does not drift with scale: what only "
            "large budgets can show, it does not count."
        )
    return out


def _all_grids(plan: Plan) -> Sequence[Grid]:
    return [plan.grid, *(one.grid for one in plan.choices if one.grid is not None)]


def _precision(plan: Plan) -> float:
    """Return the relative standard error of the median width, 1.253·sd/√n, sd from the 10th and 90th percentile."""
    found = plan.forecast
    if found.expected_range is None or found.expected is None:
        return float(1.25 / np.sqrt(found.n_sets))
    sd = (found.expected_range[1] - found.expected_range[0]) / (2 * 1.2816)
    return float(1.253 * sd / np.sqrt(found.n_bootstrapped) / found.expected)


def _is_the_papers(plan: Plan) -> bool:
    assumed = (plan.grid, plan.law, plan.noise, plan.delta_phi)
    return assumed == (PAPER_GRID, PAPER_LAW, Noise(), None)
