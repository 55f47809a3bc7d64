"""Command line: `python -m scaling COMMAND --help` explains each command and its options."""

import argparse
import os
import sys
from collections.abc import Sequence

from . import commands
from .planning.plan import add_arguments as add_design_arguments
from .planning.plan import run as run_design
from .runs.split import SPLITS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 after one `error: …` line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader of a pipe (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scaling", description="How much is one recurrence worth?"
    )
    add = parser.add_subparsers(required=True, metavar="COMMAND").add_parser
    table, fitted, printed, drawn = _table(), _fitted(), _printed(), _drawn()

    fit = add("fit", parents=[table, fitted, printed, drawn], help="fit a law, print the report")
    fit.add_argument(
        "--law",
        choices=("joint", "chinchilla"),
        default="joint",
        help="joint: with φ (default); chinchilla: N = n_once + n_rec whatever r",
    )
    _delta(fit)
    fit.set_defaults(run=commands.fit)

    report = add(
        "report", parents=[table, fitted, drawn], help="write everything about a table to files"
    )
    report.add_argument(
        "--out",
        nargs="+",
        required=True,
        metavar="FILE",
        help="by extension: .html (one file, with sliders), .md, .txt, .json",
    )
    report.add_argument("--compare", metavar="TABLE", help="a variant's run table, for Δφ")
    report.add_argument("--compare-variant", metavar="NAME", help="keep this variant of it")
    _delta(report)
    report.set_defaults(run=commands.report)

    compare = add(
        "compare", parents=[table, fitted, printed], help="Δφ of a variant against a baseline"
    )
    compare.add_argument("other", metavar="VARIANT", help="run table of the variant")
    compare.add_argument("--other-variant", metavar="NAME", help="keep this variant of VARIANT")
    compare.add_argument(
        "--drop-other", nargs="+", action="extend", default=[], metavar="RUN_ID",
        help="leave these runs of VARIANT out",
    )  # fmt: skip
    _delta(compare)
    compare.set_defaults(run=commands.compare_tables)

    design = add("design", help="what interval of φ or Δφ a planned grid would give, and its cost")
    add_design_arguments(design)
    design.set_defaults(run=run_design)

    depth = add(
        "depth", parents=[printed], help="fit L∞ + Z·exp(−z·T/μ) to losses at test recurrences"
    )
    depth.add_argument(
        "table", metavar="TABLE", help="one row per (run_id, test_recurrences): .csv, .jsonl, …"
    )
    _losses(depth, default="loss")
    depth.add_argument(
        "--mu", default="recurrences", metavar="COLUMN", help="mean recurrences in training"
    )
    depth.add_argument("--plot", metavar="OUT", help="draw points and curves (.png or .svg)")
    _delta(depth)
    depth.set_defaults(run=commands.depth)

    check = add("check", parents=[table], help="say which fits the table is ready for")
    check.set_defaults(run=commands.check)
    return parser


def _table() -> argparse.ArgumentParser:
    """Options that say which runs and which column."""
    table = argparse.ArgumentParser(add_help=False)
    table.add_argument(
        "table",
        metavar="TABLE",
        help="run table (.csv, .jsonl, .parquet) or a directory of run directories",
    )
    _losses(table)
    table.add_argument(
        "--drop", nargs="+", action="extend", default=[], metavar="RUN_ID",
        help="leave these runs out",
    )  # fmt: skip
    table.add_argument(
        "--variant", metavar="NAME", help="keep this variant (and r = 1 of others if it has none)"
    )
    return table


def _losses(parser: argparse.ArgumentParser, default: str = "val_loss") -> None:
    parser.add_argument(
        "--loss", default=default, metavar="COLUMN", help=f"column to fit (default: {default})"
    )
    parser.add_argument(
        "--loss-unit",
        choices=("nats", "bits"),
        default="nats",
        help="unit of the table's losses, per token",
    )


def _fitted() -> argparse.ArgumentParser:
    """Options of a fit with an interval."""
    fitted = argparse.ArgumentParser(add_help=False)
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in SPLITS.items())
    fitted.add_argument(
        "--split",
        choices=tuple(SPLITS),
        default="text",
        help=f"what N_once and N_rec are. {meanings}",
    )
    fitted.add_argument("--seed", type=_seed, default=0, help="seed of the bootstrap (default: 0)")
    return fitted


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _delta(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--delta",
        type=float,
        default=1e-3,
        metavar="D",
        help="Huber threshold on the log residual (default: 1e-3; 0: least absolute deviations)",
    )


def _printed() -> argparse.ArgumentParser:
    """Files beside the printed report."""
    printed = argparse.ArgumentParser(add_help=False)
    printed.add_argument("--json", metavar="OUT", help="write the numbers as JSON")
    printed.add_argument("--report", metavar="OUT", help="write the printed report")
    return printed


def _drawn() -> argparse.ArgumentParser:
    """Options of the figures."""
    drawn = argparse.ArgumentParser(add_help=False)
    drawn.add_argument("--plots", metavar="DIR", help="write isoflops, frontier and predicted")
    drawn.add_argument(
        "--plot-format", choices=("png", "svg"), default="png", help="of --plots (default: png)"
    )
    return drawn


if __name__ == "__main__":
    sys.exit(main())
