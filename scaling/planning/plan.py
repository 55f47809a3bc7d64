"""`python -m scaling design`: what a grid of runs would tell about φ, and how few runs would do.

The grid is the paper's, one of a run table, or the user's own; its law, noise and counts are guesses
that the options state (`guess.guess_of`). Without options: what the 116 runs of Schwethelm et al. 2026
(arXiv:2604.21106) buy.
"""

import argparse
import json
import sys
import time

import numpy as np

from ..outputs import write_text
from ..runs.split import SPLITS
from .cheapest import COSTS
from .guess import guess_of
from .plan_report import plan_json, render_plan
from .planned import plan

_FEWEST_SETS = 20  # percentiles of fewer estimates are their extremes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m scaling design`."""
    grid = parser.add_argument_group("grid (default: the paper's 116 runs)")
    grid.add_argument("--paper", action="store_true", help="the paper's grid, law and noise")
    grid.add_argument(
        "--like",
        metavar="TABLE",
        help="grid (one run a setting), law, noise and counts of a run table",
    )
    grid.add_argument("--loss", default="val_loss", metavar="COLUMN", help="its column to fit")
    grid.add_argument("--budgets", nargs="+", metavar="C", help="training FLOPs of a run")
    grid.add_argument(
        "--widths",
        nargs="+",
        metavar="D1,D2,…",
        help="hidden sizes: one list for all budgets or one for each (default: five about the best)",
    )
    grid.add_argument("--recurrences", nargs="+", metavar="R", help="for example 1 2 4 8")
    law = parser.add_argument_group("guess of the law and of the noise (default: the paper's)")
    law.add_argument("--law", nargs=6, metavar=("E", "A", "ALPHA", "B", "BETA", "PHI"))
    law.add_argument("--phi", type=float, help="φ of the law")
    law.add_argument("--noise-run", type=float, metavar="NATS", help="sd of each run alone")
    law.add_argument(
        "--noise-cell", type=float, metavar="NATS", help="sd that a (C, r) cell shares"
    )
    family = parser.add_argument_group("architectures, unless --like gives them")
    family.add_argument("--effective-depth", type=int, metavar="N", help="executed layers (20)")
    family.add_argument("--shared-depth", type=int, metavar="N", help="of them shared (16)")
    family.add_argument("--sequence-length", type=int, metavar="T", help="tokens (2048)")
    family.add_argument("--vocab-size", type=int, metavar="V", help="padded (32064)")
    family.add_argument(
        "--split",
        choices=tuple(SPLITS),
        help="what N_once and N_rec are (default: regression, as in the paper's law; text with --like)",
    )
    wanted = parser.add_argument_group("what is wanted")
    wanted.add_argument(
        "--delta-phi", type=float, metavar="X", help="the interval of Δφ = X instead"
    )
    wanted.add_argument(
        "--target", type=float, nargs="+", metavar="WIDTH",
        help="width of the 95 %% interval (default: the grid's own and twice it)",
    )  # fmt: skip
    wanted.add_argument("--minimise", choices=COSTS, help="default: one answer for each")
    wanted.add_argument("--sets", type=int, default=200, help="synthetic tables a grid (200)")
    wanted.add_argument("--seed", type=int, default=0, help="of the synthetic losses (0)")
    wanted.add_argument("--json", metavar="OUT", help="write the numbers as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the plan; progress goes to stderr."""
    started = time.perf_counter()
    for target in options.target or ():
        if not (np.isfinite(target) and target > 0):
            raise ValueError(
                f"--target is {target:g}, but an interval's width is positive. The paper's grid "
                "reaches about 0.1."
            )
    if options.sets < _FEWEST_SETS:
        raise ValueError(
            f"--sets is {options.sets}, but percentiles of the estimates need at least "
            f"{_FEWEST_SETS}. The default is 200."
        )
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}, but must be at least 0. The default is 0.")
    found = plan(
        guess_of(options),
        delta_phi=options.delta_phi,
        targets=options.target,
        minimise=COSTS if options.minimise is None else (options.minimise,),
        n_sets=options.sets,
        seed=options.seed,
        say=lambda text: print(text, file=sys.stderr),
    )
    print(render_plan(found), end="")
    if options.json:
        text = json.dumps(plan_json(found), indent=2, ensure_ascii=False, allow_nan=False)
        write_text(options.json, text + "\n")
    print(f"took {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return 0
