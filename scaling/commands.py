"""What each command of `python -m scaling` does with its options."""

import argparse
from pathlib import Path

import pandas as pd

from .comparison.compare import as_json as compare_json
from .comparison.compare import compare
from .comparison.compare_report import render as render_compare
from .comparison.pairing import variant_table
from .fits.fit import fit_chinchilla
from .fits.looseness import loose_direction
from .fits.saturation import fit_saturation, render_saturation
from .outputs import write_json, write_text
from .record import plain
from .reports import analysis, axes_report
from .reports.axes import PREFIX, axis_fit, with_value
from .reports.full_report import as_json as full_json
from .reports.full_report import full_report, render_full
from .reports.html import render_html
from .reports.report import render, render_chinchilla
from .reports.write import write_plots
from .runs import collect_runs, prepare, read_raw, read_table
from .runs.readiness import check_table
from .runs.table import RunTable

REPORTS = (".html", ".md", ".txt", ".json")


def fit(options: argparse.Namespace) -> int:
    """Fit one law to one column and print the report."""
    frame = _read(options.table, options, options.drop, options.variant)
    if options.law == "chinchilla":
        return _fit_chinchilla(frame, options)
    parts, value = [], {}
    if options.loss.startswith(PREFIX):
        axis = axis_fit(
            frame, options.loss, split=options.split, delta=options.delta, seed=options.seed
        )
        parts.append(axes_report.render_axes([axis]) + "\n")
        value = axes_report.as_json(axis)
        if axis.phi is None:
            return _told(options, parts, value)
        frame, _ = with_value(frame, options.loss)
    table = RunTable.of(frame, split=options.split, loss=options.loss)
    found = analysis.analyse(table, delta=options.delta, seed=options.seed)
    if options.plots:
        write_plots(options.plots, found, form=options.plot_format)
    return _told(options, [render(found), *parts], {**value, **analysis.as_json(found)})


def _fit_chinchilla(frame: pd.DataFrame, options: argparse.Namespace) -> int:
    if options.plots:
        raise ValueError("--plots shows the joint law. Leave it out, or take --law joint.")
    found = fit_chinchilla(
        RunTable.of(frame, split=options.split, loss=options.loss), delta=options.delta
    )
    value = plain(found)
    value.pop("runs")
    value["loosest_direction"] = plain(loose_direction(found))
    return _told(options, [render_chinchilla(found)], {**value.pop("law"), **value})


def _told(options: argparse.Namespace, parts: list[str], value: dict[str, object]) -> int:
    """Print the report and write what the options ask for."""
    text = "\n".join(parts)
    print(text, end="")
    if options.report:
        write_text(options.report, text)
    if options.json:
        write_json(options.json, value)
    return 0


def report(options: argparse.Namespace) -> int:
    """Write everything about a table, and about a variant beside it, in the formats asked for."""
    for path in options.out:
        if Path(path).suffix.lower() not in REPORTS:
            raise ValueError(
                f"--out is {path}, but its extension must be one of {', '.join(REPORTS)}. Figures "
                "go to --plots DIR."
            )
    frame = _read(options.table, options, options.drop, options.variant)
    variant = None
    if options.compare:
        variant = _read(options.compare, options, (), options.compare_variant)
    found = full_report(
        frame,
        split=options.split,
        loss=options.loss,
        delta=options.delta,
        seed=options.seed,
        variant=variant,
    )
    text = render_full(found)
    for path in options.out:
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            write_json(path, full_json(found))
        elif suffix == ".html":
            write_text(path, render_html(found.analysis, text, found.comparison))
        else:
            write_text(path, text)
        print(f"wrote {path}")
    if options.plots:
        for path in write_plots(options.plots, found.analysis, form=options.plot_format):
            print(f"wrote {path}")
    return 0


def compare_tables(options: argparse.Namespace) -> int:
    """Compare a variant with its baseline and print Δφ and what it means."""
    frame = _read(options.table, options, options.drop, options.variant)
    baseline = RunTable.of(frame, split=options.split, loss=options.loss)
    other = _read(options.other, options, options.drop_other, options.other_variant)
    found = compare(
        baseline, variant_table(other, baseline), delta=options.delta, seed=options.seed
    )
    return _told(options, [render_compare(found)], compare_json(found))


def depth(options: argparse.Namespace) -> int:
    """Fit the saturating law of test-time recurrences, print it and draw it."""
    if options.plot and Path(options.plot).suffix not in (".png", ".svg"):
        raise ValueError(f"--plot is {options.plot}: give a .png or .svg file.")
    frame = prepare(read_raw(Path(options.table)), loss_unit=options.loss_unit)
    found = fit_saturation(frame, loss=options.loss, mu=options.mu, delta=options.delta)
    value = plain(found)
    value.pop("points")
    if options.plot:
        from .reports.depth_plot import depth_figure  # only here: matplotlib is slow to import
        from .reports.plots import save

        save(depth_figure(found), options.plot)
        print(f"wrote {options.plot}")
    return _told(options, [render_saturation(found) + "\n"], value)


def check(options: argparse.Namespace) -> int:
    """Say which fits a table is ready for."""
    path = Path(options.table)
    frame = collect_runs(path) if path.is_dir() else read_raw(path)
    frame = prepare(frame, loss_unit=options.loss_unit, drop=options.drop, variant=options.variant)
    for one in check_table(frame, loss=options.loss):
        state = "ready  " if one.missing is None else "missing"
        print(f"{state}  {one.name}" + (f": {one.missing}" if one.missing else ""))
    return 0


def _read(
    path: str, options: argparse.Namespace, drop: list[str] | tuple[()], variant: str | None
) -> pd.DataFrame:
    return read_table(
        path, loss=options.loss, loss_unit=options.loss_unit, drop=drop, variant=variant
    )
