"""The findings as tables of text, for reports in any format.

Units: losses, E, RMSE and residuals in nats per token, C in FLOPs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..fits.subsets import SubsetFit
from ..optima.exponents import Exponents, Growth
from ..optima.gaps import SOURCES
from ..optima.predict import HeldOut
from ..runs.kinds import architecture_name
from ..text import NONE
from .findings import EXAMPLE_SIZE, Findings


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table with its heading; note: a sentence below, empty for none."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def sections(findings: Findings) -> tuple[Section, ...]:
    """Every part of the findings that the table allows, in the paper's order."""
    parts = (
        _own(findings),
        _exponents("Compute-optimal growth, each architecture's own fit", findings.exponents_own),
        _exponents("Compute-optimal growth, joint law", findings.exponents_joint),
        _gaps(findings),
        _stability(findings),
        _held_out(findings.held_out),
        _sizes(findings),
    )
    return tuple(part for part in parts if part.rows)


def _own(findings: Findings) -> Section:
    rows = []
    for one in findings.own:
        name = architecture_name(one.r, one.effective_depth)
        if one.fit is None:
            rows.append((name, str(one.n_runs), *[NONE] * 7, one.reason or ""))
            continue
        law, fit = one.fit.law, one.fit
        numbers = (f"{law.A:.4g}", f"{law.alpha:.4f}", f"{law.B:.4g}", f"{law.beta:.4f}")
        quality = (f"{law.E:.4f}", f"{fit.r2:.4f}", f"{fit.rmse:.4f}")
        note = f"on a bound: {', '.join(fit.at_bound)}" if fit.at_bound else ""
        rows.append((name, str(one.n_runs), *numbers, *quality, note))
    return Section(
        title="Each architecture alone (L = E + A·N^−α + B·D^−β; E, RMSE in nats)",
        header=("architecture", "runs", "A", "α", "B", "β", "E", "R²", "RMSE", "note"),
        rows=tuple(rows),
    )


def _exponents(title: str, found: Sequence[Exponents]) -> Section:
    rows = []
    for one in found:
        note = one.reason or ""
        if one.extrapolated and one.reason is None:
            note = "an optimum lies outside the table's widths"
        gamma = NONE if one.gamma is None else f"{one.gamma:.4f}"
        name = architecture_name(one.r, one.effective_depth)
        rows.append((name, *_growth(one.exact), *_growth(one.power_law), gamma, note))
    return Section(
        title=title,
        header=(
            "architecture",
            "N*",
            "D*",
            "L* − E",
            "N*, F = k·N^γ",
            "D*, F = k·N^γ",
            "L* − E, F = k·N^γ",
            "γ",
            "note",
        ),
        rows=tuple(rows),
        note=(
            "Exponents of the budget C. First three: minimised over the width with the "
            "architecture's exact FLOPs; next three: with FLOPs per token as a power of N over the "
            "table's widths, N* exponent β/(α+γβ), D* exponent 1 − γ·that."
        ),
    )


def _growth(growth: Growth | None) -> tuple[str, str, str]:
    if growth is None:
        return NONE, NONE, NONE
    return f"{growth.n:.3f}", f"{growth.tokens:.3f}", f"{-growth.loss:.3f}"


def _gaps(findings: Findings) -> Section:
    """One row a source and architecture: the gap at every budget, and the range."""
    budgets = sorted({one.budget_flops for one in findings.gaps})
    found = {
        (one.source, one.r, one.effective_depth, one.budget_flops): one.gap for one in findings.gaps
    }
    rows = []
    for one in findings.ranges:
        values = [found.get((one.source, one.r, one.effective_depth, c)) for c in budgets]
        ends = NONE if one.low is None else f"[{one.low:.3f}, {one.high:.3f}]"
        cells = [NONE if value is None else f"{value:+.4f}" for value in values]
        name = architecture_name(one.r, one.effective_depth)
        rows.append((SOURCES[one.source], name, *cells, ends))
    reasons = sorted({one.reason for one in findings.gaps if one.reason is not None})
    return Section(
        title="Gap to r = 1 at equal compute (nats per token)",
        header=(
            "from",
            "architecture",
            *(f"C = {budget:.3g}" for budget in budgets),
            "range",
        ),
        rows=tuple(rows),
        note=f"Without a gap: {'; '.join(reasons)}." if reasons else "",
    )


def _stability(findings: Findings) -> Section:
    parts: list[SubsetFit] = [*findings.halves]
    parts += [findings.lowest] if findings.lowest is not None else []
    parts += [*findings.without_r, *findings.depths]
    rows = []
    for one in parts:
        if one.fit is None:
            rows.append((one.name, str(one.n_runs), *[NONE] * 6, one.reason or ""))
            continue
        law, fit = one.fit.law, one.fit
        exponents = (f"{law.phi:.4f}", f"{law.alpha:.4f}", f"{law.beta:.4f}", f"{law.E:.4f}")
        note = f"on a bound: {', '.join(fit.at_bound)}" if fit.at_bound else ""
        quality = (f"{fit.r2:.4f}", f"{fit.rmse:.4f}")
        rows.append((one.name, str(one.n_runs), *exponents, *quality, note))
    return Section(
        title="Joint law on parts of the table (E, RMSE in nats)",
        header=("runs of", "runs", "φ", "α", "β", "E", "R²", "RMSE", "note"),
        rows=tuple(rows),
        note="The split of N is that of the whole table throughout.",
    )


def _held_out(found: HeldOut | None) -> Section:
    rows: list[tuple[str, ...]] = []
    note = ""
    if found is not None and found.fit is None:
        rows = [("all", str(found.n_held_out), NONE, NONE, NONE)]
        note = f"Not available: {found.reason}"
    elif found is not None and found.fit is not None:
        rows = [
            (f"r = {one.r}", str(one.n_runs), *_errors(one.mean, one.max_abs, one.rmse))
            for one in found.residuals
        ]
        whole = _errors(found.mean, found.max_abs, found.rmse)
        rows.append(("all", str(found.n_held_out), *whole))
        note = f"Fitted to the other {found.n_fitted} runs: φ = {found.fit.law.phi:.4f}."
    return Section(
        title="Largest budget predicted from the others (observed − predicted, nats)",
        header=("runs", "held out", "mean", "max |.|", "RMSE"),
        rows=tuple(rows),
        note=note,
    )


def _errors(*values: float | None) -> tuple[str, ...]:
    """Mean with its sign, then the sizes."""
    mean, *sizes = (float("nan") if value is None else value for value in values)
    return f"{mean:+.4f}", *(f"{size:.4f}" for size in sizes)


def _sizes(findings: Findings) -> Section:
    rows = tuple(
        (
            architecture_name(one.r, one.effective_depth),
            f"{one.hidden_size:.0f}",
            f"{one.n / 1e9:.3f} B",
            f"{one.n_eff / 1e9:.3f} B",
            "extrapolated" if one.extrapolated else "",
        )
        for one in findings.sizes
    )
    return Section(
        title=f"As wide as an unlooped model of {EXAMPLE_SIZE / 1e9:g} B parameters",
        header=("architecture", "width", "N", "N_eff", "note"),
        rows=rows,
    )
