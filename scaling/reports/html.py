"""The report as one self-contained HTML file that opens offline, with sliders for φ and C.

Plotly's script is written into the file; nothing is fetched when it is opened.
"""

import html
import json
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt

from ..comparison.compare import Comparison
from ..optima.frontier import frontier
from ..record import plain
from ..runs.kinds import architecture_name, by_architecture, effective_depths
from .analysis import Analysis

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_TEMPLATE = Path(__file__).with_name("report_template.html")


def render_html(analysis: Analysis, text: str, comparison: Comparison | None = None) -> str:
    """Write the page: sliders and figures of `analysis`, then the Markdown report `text`.

    With `comparison` a histogram of Δφ over its resamples is added. Raises ValueError where plotly
    is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # here, so that fits work without plotly
    except ImportError as error:
        raise ValueError(
            "an HTML report needs plotly, which is not installed. pip install plotly"
        ) from error
    figures = {
        "frontier": _frontier(analysis),
        "residuals": _residuals(analysis),
        "histogram": _histogram(analysis.interval.draws, analysis.phi, "φ"),
    }
    if comparison is not None:
        figures["delta"] = _histogram(comparison.draws, comparison.delta_phi, "Δφ")
    data = {
        "law": analysis.fit.law,
        "architectures": _architectures(analysis),
        "budgets": analysis.budgets(),
        "no_curves": _no_curves(analysis),
        "figures": figures,
    }
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(f"φ of {analysis.fit.source}"),
        plotly=get_plotlyjs(),
        comparison="" if comparison is None else '<div id="delta" class="plot"></div>',
        report=MarkdownIt("commonmark", {"html": False}).enable("table").render(text),
        data=_embedded(data),
    )


def _embedded(data: dict[str, Any]) -> str:
    """JSON that no text within can end the surrounding script element."""
    return json.dumps(plain(data), allow_nan=False).replace("<", "\\u003c")


def _no_curves(analysis: Analysis) -> str:
    if not analysis.budgets():
        return "the table has no budget_flops."
    return "; ".join(f"r = {r}: {why}" for r, why in analysis.frontier_reasons.items())


def _styles(analysis: Analysis) -> dict[tuple[int, float | None], dict[str, str]]:
    """Name and colour of every architecture, by (r, effective depth)."""
    runs = analysis.fit.runs
    several = len(effective_depths(runs)) > 1
    return {
        (r, depth): {
            "name": architecture_name(r, depth if several else None),
            "colour": COLOURS[k % len(COLOURS)],
        }
        for k, (r, depth, _) in enumerate(by_architecture(runs))
    }


def _architectures(analysis: Analysis) -> list[dict[str, Any]]:
    """Every architecture with polynomials in d: these, its style, and its runs."""
    styles, runs = _styles(analysis), analysis.fit.runs
    groups = {(r, depth): group for r, depth, group in by_architecture(runs)}
    columns = ["run_id", "n", "loss", "budget_flops"]
    out = []
    for one in analysis.architectures:
        key = (one.r, one.effective_depth)
        points = groups[key][columns] if "budget_flops" in runs else groups[key].iloc[:0]
        out.append({**vars(one), **styles[key], "runs": points.dropna().to_dict("list")})
    return out


def _figure(traces: list[dict[str, Any]], title: str, x: str, y: str, **layout: Any) -> Any:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return {"traces": traces, "layout": {"title": {"text": title}, **axes, **layout}}


def _frontier(analysis: Analysis) -> Any:
    traces, budgets, styles = [], analysis.budgets(), _styles(analysis)
    for one in analysis.architectures if budgets else ():
        points = frontier(analysis.fit.law, [one], budgets).dropna(subset="loss")
        style = styles[(one.r, one.effective_depth)]
        traces.append(
            {
                "x": points["budget_flops"].tolist(),
                "y": points["loss"].tolist(),
                "mode": "lines+markers",
                "name": style["name"],
                "line": {"color": style["colour"]},
            }
        )
    return _figure(
        traces,
        "Frontier: lowest predicted loss",
        "C, FLOPs",
        "loss, nats per token",
        xaxis={"title": {"text": "C, FLOPs"}, "type": "log", "exponentformat": "power"},
    )


def _residuals(analysis: Analysis) -> Any:
    styles = _styles(analysis)
    traces = [
        {
            "x": group["predicted"].tolist(),
            "y": group["residual"].tolist(),
            "text": group["run_id"].astype(str).tolist(),
            "mode": "markers",
            "name": styles[(r, depth)]["name"],
            "marker": {"color": styles[(r, depth)]["colour"]},
        }
        for r, depth, group in by_architecture(analysis.fit.runs)
    ]
    return _figure(
        traces, "Residuals", "predicted loss, nats per token", "observed − predicted, nats"
    )


def _histogram(draws: tuple[float, ...], value: float, name: str) -> Any:
    traces = [{"x": list(draws), "type": "histogram", "name": "resamples"}] if draws else []
    line = {"type": "line", "x0": value, "x1": value, "yref": "paper", "y0": 0, "y1": 1}
    title = f"{name} over resamples, {value:.4f} for all runs"
    return _figure(traces, title, name, "resamples", shapes=[line])
