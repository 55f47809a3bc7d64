"""Command line: `python -m scaling fit TABLE` fits the joint law.

`python -m scaling check TABLE` says what is missing.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .analysis import analyse
from .outputs import write_json, write_plots, write_text
from .readiness import check_table
from .report import render
from .runs import collect_runs, prepare, read_raw
from .split import SPLITS
from .table import RunTable


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


def _fit(options: argparse.Namespace) -> int:
    table = RunTable.read(
        options.table,
        split=options.split,
        loss=options.loss,
        loss_unit=options.loss_unit,
        drop=options.drop,
        variant=options.variant,
    )
    analysis = analyse(table, seed=options.seed)
    text = render(analysis)
    print(text, end="")
    if options.report:
        write_text(options.report, text)
    if options.json:
        write_json(options.json, analysis)
    if options.plots:
        try:
            write_plots(options.plots, analysis)
        except ImportError as error:
            raise ValueError(
                "--plots needs matplotlib, which is not installed. pip install matplotlib"
            ) from error
    return 0


def _check(options: argparse.Namespace) -> int:
    path = Path(options.table)
    frame = collect_runs(path) if path.is_dir() else read_raw(path)
    frame = prepare(frame, loss_unit=options.loss_unit, drop=options.drop, variant=options.variant)
    found = check_table(frame, loss=options.loss)
    for one in found:
        print(
            f"{'ready  ' if one.missing is None else 'missing'}  {one.name}"
            + (f": {one.missing}" if one.missing else "")
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scaling", description="How much is one recurrence worth?"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    table = argparse.ArgumentParser(add_help=False)
    table.add_argument(
        "table",
        metavar="TABLE",
        help="run table (.csv, .jsonl, .parquet) or a directory of run directories",
    )
    table.add_argument(
        "--loss", default="val_loss", metavar="COLUMN", help="column to fit (default: val_loss)"
    )
    table.add_argument(
        "--loss-unit",
        choices=("nats", "bits"),
        default="nats",
        help="unit of the table's losses, per token",
    )
    table.add_argument(
        "--drop",
        nargs="+",
        action="extend",
        default=[],
        metavar="RUN_ID",
        help="leave these runs out",
    )
    table.add_argument(
        "--variant", metavar="NAME", help="keep this variant (and r = 1 of others if it has none)"
    )

    fit = commands.add_parser("fit", parents=[table], help="fit the joint law, print the report")
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in SPLITS.items())
    fit.add_argument(
        "--split",
        choices=tuple(SPLITS),
        default="text",
        help=f"what N_once and N_rec are. {meanings}",
    )
    fit.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default: 0)")
    fit.add_argument("--json", metavar="OUT", help="write the numbers as JSON")
    fit.add_argument(
        "--plots", metavar="DIR", help="write isoflops.png, frontier.png and predicted.png"
    )
    fit.add_argument("--report", metavar="OUT", help="write the printed report")
    fit.set_defaults(run=_fit)

    check = commands.add_parser(
        "check", parents=[table], help="say which fits the table is ready for"
    )
    check.set_defaults(run=_check)
    return parser


if __name__ == "__main__":
    sys.exit(main())
