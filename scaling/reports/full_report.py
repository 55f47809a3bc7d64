"""Everything about one table in one report, and about a variant beside it.

The analysis, the paper's further tables, other laws, the split's influence, every task axis, Δφ. A part
that the table does not allow keeps its reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pandas as pd

from ..comparison.compare import Comparison, compare
from ..comparison.compare import as_json as compare_json
from ..comparison.compare_report import render as render_compare
from ..comparison.pairing import variant_table
from ..fits.criteria import LawComparison, compare_laws, render_comparison
from ..fits.iso_parameter import COUNTINGS, IsoParameterFit, fit_iso_parameter, render_iso_parameter
from ..fits.per_architecture import FloorComparison, fit_floors, render_floors
from ..fits.sensitivity import SplitSensitivity, render_sensitivity, split_sensitivity
from ..record import plain
from ..runs.table import RunTable
from ..text import markdown_table, wrap
from .analysis import Analysis, analyse
from .analysis import as_json as analysis_json
from .axes import AxisFit, axis_fits
from .axes_report import axes_json, render_axes
from .findings import Findings, findings
from .findings_tables import sections
from .report import render

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, eq=False)
class FullReport:
    """All parts; one that could not be computed is None, with its reason under its name in `reasons`.

    iso_parameter: Parcae's accounting, by what is counted r times. floors: E of each architecture
    against a shared one. axes: every loss/… column. comparison: None without a variant.
    """

    analysis: Analysis
    findings: Findings
    laws: LawComparison | None
    iso_parameter: tuple[IsoParameterFit, ...]
    floors: FloorComparison | None
    splits: SplitSensitivity | None
    axes: tuple[AxisFit, ...]
    comparison: Comparison | None
    reasons: dict[str, str] = field(default_factory=dict)


def full_report(
    frame: pd.DataFrame,
    *,
    split: str = "text",
    loss: str = "val_loss",
    delta: float = 1e-3,
    seed: int = 0,
    variant: pd.DataFrame | None = None,
) -> FullReport:
    """Compute every part for a run table as `runs.read_table` returns it, and Δφ for a `variant`.

    Raises ValueError for a bad table, a design that cannot identify φ, or a variant that cannot be
    compared.
    """
    baseline = RunTable.of(frame, split=split, loss=loss)
    analysis = analyse(baseline, delta=delta, seed=seed)
    reasons: dict[str, str] = {}
    counted = []
    for counting in COUNTINGS:
        part = partial(fit_iso_parameter, baseline, counting=counting, delta=delta)
        counted.append(_tried(reasons, f"iso-parameter law, {counting}", part))
    return FullReport(
        analysis=analysis,
        findings=findings(analysis.fit),
        laws=_tried(reasons, "laws", lambda: compare_laws(baseline, delta=delta)),
        iso_parameter=tuple(one for one in counted if one is not None),
        floors=_tried(reasons, "floors", lambda: fit_floors(baseline, delta=delta)),
        splits=_tried(
            reasons,
            "splits",
            lambda: split_sensitivity(frame, loss=loss, delta=delta, seed=seed),
        ),
        axes=axis_fits(frame, split=split, delta=delta, seed=seed),
        comparison=None
        if variant is None
        else compare(baseline, variant_table(variant, baseline), delta=delta, seed=seed),
        reasons=reasons,
    )


def _tried(reasons: dict[str, str], name: str, part: Callable[[], _T]) -> _T | None:
    """Compute a part, or note why not."""
    try:
        return part()
    except ValueError as error:
        reasons[name] = str(error)
        return None


def render_full(report: FullReport) -> str:
    """Write everything as Markdown, the comparison first."""
    parts = [] if report.comparison is None else [render_compare(report.comparison).rstrip()]
    parts.append(render(report.analysis).rstrip())
    for section in sections(report.findings):
        parts.append(f"## {section.title}\n\n{markdown_table(section.header, section.rows)}")
        if section.note:
            parts.append(wrap(section.note))
    if report.laws is not None:
        parts.append(f"## Which law describes the runs\n\n{render_comparison(report.laws)}")
    if report.floors is not None:
        parts.append(f"## E of each architecture or one for all\n\n{render_floors(report.floors)}")
    if report.iso_parameter:
        parts.append("## Recurrences counted as layers (iso-parameter law)")
        parts += [render_iso_parameter(one) for one in report.iso_parameter]
    if report.splits is not None:
        parts.append(f"## φ under each split of N\n\n{render_sensitivity(report.splits)}")
    if report.axes:
        parts.append(f"## φ per task axis\n\n{render_axes(report.axes)}")
    if report.reasons:
        missing = [f"- {name}: {reason}" for name, reason in report.reasons.items()]
        parts.append("## Not available\n\n" + "\n".join(wrap(one, indent="  ") for one in missing))
    return "\n\n".join(parts) + "\n"


def as_json(report: FullReport) -> dict[str, Any]:
    """Plain JSON values: those of `analysis.as_json`, then each further part under its name."""
    value = analysis_json(report.analysis)
    for name in ("findings", "laws", "iso_parameter", "floors", "splits"):
        value[name] = _without_runs(plain(getattr(report, name)))
    value["axes"] = axes_json(report.axes)
    if report.comparison is not None:
        value["comparison"] = compare_json(report.comparison)
    return {**value, "not_available": report.reasons}


def _without_runs(value: Any) -> Any:
    """Leave out the tables of runs that every fit carries."""
    if isinstance(value, dict):
        return {name: _without_runs(item) for name, item in value.items() if name != "runs"}
    return [_without_runs(item) for item in value] if isinstance(value, list) else value
