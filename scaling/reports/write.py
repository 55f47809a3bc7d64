"""Write one table's analysis to a directory: report.txt, fit.json and three PNGs.

The CLI and the sweep share it.
"""

import os
from pathlib import Path

import pandas as pd

from ..outputs import write_json, write_text
from ..runs.table import RunTable
from .analysis import Analysis, analyse, as_json
from .report import render


def write_outputs(data: RunTable | pd.DataFrame, out_dir: str | os.PathLike[str]) -> Analysis:
    """Analyse a run table and write its report, numbers and figures to `out_dir`.

    Files: `report.txt`, `fit.json`, `isoflops.png`, `frontier.png`, `predicted.png`. Returns
    the analysis: `.phi`, `.phi_ci`, `.fit`, `.warnings`. Nothing is written when the table
    cannot be fitted; raises the ValueError that says why.
    """
    analysis = analyse(data)
    out_dir = Path(out_dir)
    write_text(out_dir / "report.txt", render(analysis))
    write_json(out_dir / "fit.json", as_json(analysis))
    write_plots(out_dir, analysis)
    return analysis


def write_plots(
    out_dir: str | os.PathLike[str], analysis: Analysis, *, form: str = "png"
) -> tuple[Path, ...]:
    """Write the three figures as PNG or SVG and return their paths.

    Raises ValueError where matplotlib is not installed.
    """
    try:
        from . import plots  # here, so that fits work without matplotlib
    except ImportError as error:
        raise ValueError(
            "figures need matplotlib, which is not installed. pip install matplotlib"
        ) from error
    figures = {
        "isoflops": plots.isoflops_figure,
        "frontier": plots.frontier_figure,
        "predicted": plots.predicted_figure,
    }
    paths = []
    for name, figure in figures.items():
        paths.append(Path(out_dir) / f"{name}.{form}")
        plots.save(figure(analysis), paths[-1])
    return tuple(paths)
