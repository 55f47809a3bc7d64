"""φ per task axis as text and as JSON: every axis, its losses over seeds, and what was too noisy.

The table of losses over seeds is laid out as table 10 of Schwethelm et al. 2026 (arXiv:2604.21106).
"""

from collections.abc import Sequence
from typing import Any

from ..record import plain
from ..text import NONE, bullets, markdown_table, wrap
from .axes import AxisFit, SeedMean, Thresholds

NOISY = "too noisy"
_NAMED = 8  # runs left out that are listed by name


def render_axes(fits: Sequence[AxisFit]) -> str:
    """Write the axes as Markdown: a table, the losses over seeds, reasons and thresholds."""
    if not fits:
        return "The table has no loss/… columns."
    parts = [
        markdown_table(
            (
                "axis",
                "φ",
                "95 % interval",
                "R²",
                "runs",
                "left out",
                "sd over seeds",
                "sd between r",
                "φ over seeds",
            ),
            [_row(one) for one in fits],
        ),
        _over_seeds(fits),
        bullets([text for one in fits for text in _notes(one)]),
        *(wrap(_rules(rules)) for rules in dict.fromkeys(one.thresholds for one in fits)),
    ]
    return "\n\n".join(part for part in parts if part)


def as_json(one: AxisFit) -> dict[str, Any]:
    """Plain JSON values: phi (null when too noisy), phi_ci and reason first, then the details.

    `fitted` holds the law even of an axis that is too noisy.
    """
    fit, interval = one.fit, one.interval
    fitted = None
    if fit is not None:
        names = ("r2", "rmse", "objective", "condition", "at_bound")
        fitted = {**plain(fit.law), **{name: plain(getattr(fit, name)) for name in names}}
    drawn = None
    if interval is not None:
        drawn = {name: item for name, item in plain(interval).items() if name != "draws"}
    return {
        "phi": one.phi,
        "phi_ci": plain(one.phi_ci),
        "reason": one.reason,
        "loss": one.axis,
        "n_runs": one.n_runs,
        "missing": list(one.missing),
        "fitted": fitted,
        "interval": drawn,
        "seed_spread": plain(one.spread),
        "spread_between_r": plain(one.between),
        "seed_share": plain(one.seed_share),
        "by_seed": plain(one.by_seed),
        "settings": plain(one.settings),
        "thresholds": plain(one.thresholds),
    }


def axes_json(fits: Sequence[AxisFit]) -> dict[str, Any]:
    """`as_json` of every axis under its column's name."""
    return {one.axis: as_json(one) for one in fits}


def _row(one: AxisFit) -> tuple[str, ...]:
    by_seed = one.by_seed
    return (
        one.axis,
        NOISY if one.phi is None else f"{one.phi:.3f}",
        NONE if one.phi_ci is None else f"[{one.phi_ci[0]:.3f}, {one.phi_ci[1]:.3f}]",
        NONE if one.fit is None else f"{one.fit.r2:.4f}",
        str(one.n_runs),
        str(len(one.missing)),
        NONE if one.spread is None else f"{one.spread.sd:.4f}",
        NONE if one.between is None else f"{one.between:.4f}",
        NONE
        if by_seed is None or by_seed.mean is None
        else f"{by_seed.mean:.3f} ± {by_seed.sd:.3f} ({len(by_seed.phis)})",
    )


def _over_seeds(fits: Sequence[AxisFit]) -> str:
    """Mean ± sd over seeds at the largest budget that was run with several, by r."""
    budgets = [cell.budget_flops for one in fits for cell in one.settings if cell.budget_flops]
    if not budgets:
        return ""
    budget = max(budgets)
    chosen = {one.axis: _best(one.settings, budget) for one in fits}
    rs = sorted({r for cells in chosen.values() for r in cells})
    rows = []
    for axis, cells in chosen.items():
        found = [cells.get(r) for r in rs]
        shown = [
            NONE if cell is None else f"{cell.mean:.4f} ± {cell.sd:.4f} ({cell.n_seeds})"
            for cell in found
        ]
        rows.append((axis, *shown))
    text = markdown_table(("axis", *(f"r = {r}" for r in rs)), rows)
    title = (
        f"Loss at C = {budget:g} FLOPs, mean ± sd over seeds (their number), nats per token; each r "
        "at its best width of those with several seeds:"
    )
    return f"{wrap(title)}\n\n{text}"


def _best(settings: Sequence[SeedMean], budget: float) -> dict[int, SeedMean]:
    best: dict[int, SeedMean] = {}
    for cell in settings:
        if cell.budget_flops == budget and (cell.r not in best or cell.mean < best[cell.r].mean):
            best[cell.r] = cell
    return best


def _notes(one: AxisFit) -> list[str]:
    out = []
    if one.reason is not None:
        out.append(f"{one.axis}: {NOISY}: {one.reason}.")
    if one.missing:
        more = len(one.missing) - _NAMED
        named = ", ".join(one.missing[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        out.append(f"{one.axis}: {len(one.missing)} finished runs have no value: {named}.")
    if one.by_seed is not None and one.by_seed.reason is not None:
        out.append(f"{one.axis}: no φ by seed: {one.by_seed.reason}.")
    return out


def _rules(rules: Thresholds) -> str:
    return (
        f"An axis is {NOISY} when its runs identify no law, when A, α or φ stops on a bound of the "
        f"search, when φ has no interval or one wider than {rules.max_width:g} (95 %), or when the "
        f"sd of one run over seeds exceeds {rules.max_seed_share:g} of the sd between the r of one "
        "budget. Runs of all seeds enter one fit; φ over seeds is the mean ± sd of fits to each seed "
        "alone."
    )
