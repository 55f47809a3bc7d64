"""The text report: φ and what it says.

The law, restricted fits, residuals, minima, seeds, warnings. Markdown tables.
"""

import numpy as np

from ..fits.fit import ChinchillaFit, Fit
from ..fits.looseness import loose_warnings
from ..fits.profile import PhiProfile
from ..runs.split import SPLITS
from ..text import NONE, bullets, count, criterion, markdown_table, unit_of, wrap
from .analysis import Analysis


def render(analysis: Analysis) -> str:
    """Write the whole report as text; every table is Markdown with aligned columns."""
    parts = [
        _headline(analysis),
        _law(analysis),
        _residuals(analysis.fit),
        _minima(analysis),
        _seeds(analysis),
        _warnings(analysis),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_chinchilla(fit: ChinchillaFit) -> str:
    """Write the fit of Chinchilla's law, which knows no recurrences."""
    law = fit.law
    left_out = ", ".join(f"{count} {status}" for status, count in fit.n_left_out.items()) or "none"
    lines = [
        "# Chinchilla's law",
        "",
        f"L = {law.E:.5f} + {law.A:.6g}·N^−{law.alpha:.6f} + {law.B:.6g}·D^−{law.beta:.6f}, N = n_once + n_rec",
        "",
        f"Table:  {fit.source}, column {fit.loss} in {unit_of(fit.loss_unit)}",
        f"Runs:   {fit.n_runs} finished, left out: {left_out}",
        f"Fit:    {criterion(fit.delta)}, objective {fit.objective:.10e}, reached by "
        f"{fit.n_at_best} of {fit.n_starts} starts",
        f"Errors: R² {fit.r2:.4f}, RMSE {fit.rmse:.4f} nats; Hessian condition {fit.condition:.2g}",
    ]
    if fit.at_bound:
        lines.append(f"On a bound, not determined by the runs: {', '.join(fit.at_bound)}")
    parts = ["\n".join(lines), _residuals(fit)]
    if warnings := loose_warnings(fit):
        parts.append("## Warnings\n\n" + bullets(warnings))
    return "\n\n".join(parts) + "\n"


def phi_line(analysis: Analysis) -> str:
    """One line: φ with its interval, e.g.

    "φ = 0.459, 95 % interval [0.414, 0.507] (200 resamples of 24 cells)".
    """
    text = f"φ = {analysis.phi:.4f}"
    interval = analysis.phi_ci
    if interval is None:
        return f"{text}, interval unavailable: {analysis.interval.reason}"
    drawn = analysis.interval
    cells = f"{drawn.n_resamples} resamples of {drawn.n_cells} (budget, r) cells"
    return f"{text}, 95 % interval [{interval[0]:.3f}, {interval[1]:.3f}] ({cells})"


def _headline(analysis: Analysis) -> str:
    fit = analysis.fit
    left_out = sum(fit.n_left_out.values())
    others = ", ".join(f"{count} {status}" for status, count in fit.n_left_out.items())
    largest = [row.r for row in fit.residuals if row.r > 1]
    worth = ", ".join(f"{r**fit.law.phi:.2f} × at r = {r}" for r in largest)
    says = (
        f"Run r times, the shared block counts as r^φ times its own parameters: {worth}. Full "
        "worth, a block of its own for "
        "every recurrence, would be r × (φ = 1); no worth 1 × (φ = 0)."
    )
    return "\n".join(
        [
            "# Recurrence-equivalence exponent",
            "",
            phi_line(analysis),
            _profile(analysis.profile),
            "",
            wrap(says),
            "",
            f"Table:  {fit.source}, column {fit.loss} in {unit_of(fit.loss_unit)}",
            f"Runs:   {fit.n_runs} finished, {left_out} left out"
            + (f" ({others})" if others else ""),
            wrap(f"Split:  {fit.split}: {SPLITS[fit.split]}", indent="        "),
            f"Law:    L = E + A·(N_once + r^φ·N_rec)^−α + B·D^−β, {criterion(fit.delta)}",
        ]
    )


def _profile(profile: PhiProfile) -> str:
    def end(value: float | None) -> str:
        return "open" if value is None else f"{value:.3f}"

    because = f"; {profile.reason}" if profile.reason else ""
    return (
        f"Profile likelihood (Laplace errors, runs taken as independent): [{end(profile.low)}, "
        f"{end(profile.high)}]{because}"
    )


def _law(analysis: Analysis) -> str:
    fits = [
        ("free φ", analysis.fit),
        *((f"φ = {phi}", fit) for phi, fit in analysis.restricted.items()),
    ]
    rows = [
        [
            name,
            f"{fit.law.phi:.4f}",
            f"{fit.law.alpha:.4f}",
            f"{fit.law.beta:.4f}",
            f"{fit.law.E:.4f}",
            f"{fit.law.A:.4g}",
            f"{fit.law.B:.4g}",
            f"{fit.r2:.4f}",
            f"{fit.rmse:.4f}",
            f"{fit.objective:.4e}",
            f"{fit.n_at_best}/{fit.n_starts}",
        ]
        for name, fit in fits
    ]
    header = ["fit", "φ", "α", "β", "E", "A", "B", "R²", "RMSE", "objective", "starts at best"]
    return "## Fits (E, RMSE in nats)\n\n" + markdown_table(header, rows)


def _residuals(fit: Fit) -> str:
    rows = [
        [f"{row.r}", f"{row.n_runs}", f"{row.mean:+.4f}", f"{row.max_abs:.4f}", f"{row.rmse:.4f}"]
        for row in fit.residuals
    ]
    return "## Residuals by r (observed − predicted, nats)\n\n" + markdown_table(
        ["r", "runs", "mean", "max |.|", "RMSE"], rows
    )


def _minima(analysis: Analysis) -> str:
    if not analysis.minima:
        return "## Iso-FLOPs minima\n\nNot available: the table has no budget_flops."
    rows = []
    for one in analysis.minima:
        if one.n is not None and one.loss is not None:
            found = [
                f"{one.loss:.5f}",
                count(one.n),
                "exact through 3 sizes" if one.n_sizes == 3 else "",
            ]
        else:
            found = [NONE, NONE, f"not determined: {one.reason}"]
        rows.append([f"{one.budget_flops:.3g}", f"{one.r}", f"{one.n_runs}", *found])
    header = ["C, FLOPs", "r", "runs", "loss, nats", "N", "note"]
    return (
        "## Iso-FLOPs minima (parabola in log N; descriptive, the frontier comes from the law)\n\n"
        + markdown_table(header, rows)
    )


def _seeds(analysis: Analysis) -> str:
    if analysis.seeds is None or not analysis.gaps:
        return ""
    seeds, gaps = analysis.seeds, analysis.gaps
    rows = [
        [
            f"{g.budget_flops:.3g}",
            f"{g.r_low} → {g.r_high}",
            f"{g.loss_low:.4f}",
            f"{g.loss_high:.4f}",
            f"{g.gap:+.4f}",
        ]
        + [f"{g.gap / seeds.sd:+.1f}" if seeds.sd > 0 else NONE]
        for g in gaps
    ]
    mean = float(np.mean([g.gap for g in gaps]))
    text = (
        f"One run varies by {seeds.sd:.4f} nats over seeds (pooled standard deviation, "
        f"{seeds.n_settings} settings with "
        f"several seeds, {seeds.dof} degrees of freedom); neighbouring r differ by {mean:+.4f} "
        "nats on average at equal "
        "budget (each r at its best width, mean over seeds)."
    )
    header = ["C, FLOPs", "r", "best loss", "best loss", "gap", "gap / seed sd"]
    return f"## Seeds against r\n\n{wrap(text)}\n\n{markdown_table(header, rows)}"


def _warnings(analysis: Analysis) -> str:
    if not analysis.warnings:
        return ""
    return "## Warnings\n\n" + bullets(analysis.warnings)
