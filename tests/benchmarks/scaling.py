"""The exact solver against restarts of scipy's L-BFGS-B, CPU seconds in one run.

`python tests/benchmarks/scaling.py [--points CSV] [--repeats N] [--restarts N] [--json FILE]` prints two tables;
the contestants take turns, and each has its least CPU time of several rounds:

    fits       500 starts of `fit_joint` and `fit_chinchilla` against 500 restarts on finite differences,
               on the paper's 116 runs; `--points` adds Chinchilla's law on Epoch AI's extraction of Hoffmann
               et al.'s runs (columns n_params, train_flops, loss; the five highest losses dropped)
    resamples  200 block resamples of the joint law, and how far each ends from its own 500-start optimum

How far a contestant stops above the lowest objective of both is given beside its time.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # CPU time then means the same for both

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize
from scipy.special import huber, logsumexp

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from scaling import RunTable, fit_chinchilla, fit_joint
from scaling.fits.cells import cells_of, draw_cells
from scaling.solver.solve import solve, solve_resamples

DELTA, STARTS, RESAMPLES = 1e-3, 500, 200
PAPER = Path(__file__).parents[1] / "fixtures" / "paper_runs_baseline.csv"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One law on one table. ours: our fit → its objective."""

    name: str
    table: RunTable
    joint: bool
    ours: Callable[[RunTable], float]


def problems(points: Path | None) -> list[Problem]:
    """Both laws on the paper's runs, and Chinchilla's on `points`."""
    paper = RunTable.read(PAPER, split="regression")
    found = [
        Problem(name="joint law", table=paper, joint=True, ours=lambda t: fit_joint(t).objective),
        Problem(name="Chinchilla", table=paper, joint=False, ours=_chinchilla),
    ]
    if points is not None:
        found.append(
            Problem(name="Chinchilla, points", table=_read(points), joint=False, ours=_chinchilla)
        )
    return found


def _chinchilla(table: RunTable) -> float:
    return fit_chinchilla(table).objective


def _read(points: Path) -> RunTable:
    frame = pd.read_csv(points).sort_values("loss").iloc[:-5]
    n = frame["n_params"].to_numpy()
    return RunTable.of(
        pd.DataFrame(
            {
                "run_id": [f"point-{k}" for k in range(len(frame))],
                "recurrences": 1,
                "n_once": n,
                "n_rec": 0.0,
                "tokens": frame["train_flops"].to_numpy() / (6 * n),
                "val_loss": frame["loss"].to_numpy(),
            }
        )
    )


def restarts(problem: Problem, count: int) -> float:
    """Lowest objective of `count` random starts of L-BFGS-B with finite-difference gradients."""
    runs = problem.table.runs
    once, rec, r = (runs[name].to_numpy(dtype=float) for name in ("n_once", "n_rec", "r"))
    log_d, log_loss = np.log(runs["tokens"].to_numpy()), np.log(runs["loss"].to_numpy())
    log_n = np.log(runs["n"].to_numpy(dtype=float))  # the model's own, whatever the split

    def objective(theta: np.ndarray) -> float:
        a, b, e, alpha, beta = theta[:5]
        size = np.log(once + r ** theta[5] * rec) if problem.joint else log_n
        terms = np.stack([a - alpha * size, b - beta * log_d, np.full_like(log_d, e)])
        return float(huber(DELTA, logsumexp(terms, axis=0) - log_loss).sum())

    box = [(0.0, 25.0), (0.0, 25.0), (-1.0, 1.5), (0.0, 2.0), (0.0, 2.0), (-1.0, 2.0)]
    low, high = np.array(box[: 6 if problem.joint else 5]).T
    generator = np.random.default_rng(0)
    return min(
        float(minimize(objective, generator.uniform(low, high), method="L-BFGS-B").fun)
        for _ in range(count)
    )


def least_cpu(
    contestants: dict[str, Callable[[], float]], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Least CPU seconds of each, and the objective it reached; they take turns."""
    times = dict.fromkeys(contestants, float("inf"))
    reached = {}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.process_time()
            reached[name] = run()
            times[name] = min(times[name], time.process_time() - start)
    return times, reached


def compare_fits(points: Path | None, count: int, rounds: int) -> list[dict[str, Any]]:
    """One row for each problem: times, their ratio, distances to the lowest objective of both."""
    rows = []
    for problem in problems(points):
        contestants = {
            "ours": lambda problem=problem: problem.ours(problem.table),
            "scipy": lambda problem=problem: restarts(problem, count),
        }
        times, reached = least_cpu(contestants, rounds)
        best = min(reached.values())
        rows.append(
            {
                "law": problem.name,
                "runs": len(problem.table),
                "ours_cpu_s": times["ours"],
                "scipy_cpu_s": times["scipy"],
                "ratio": times["scipy"] / times["ours"],
                "ours_above": reached["ours"] / best - 1,
                "scipy_above": reached["scipy"] / best - 1,
            }
        )
    return rows


def resample(rounds: int) -> dict[str, Any]:
    """Time 200 block resamples, then fit each with 500 starts of its own."""
    table = RunTable.read(PAPER, split="regression")
    fit = fit_joint(table)
    cells = cells_of(fit.runs)
    weights = cells.weights(draw_cells(cells, RESAMPLES, 0)[0])
    seconds = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        _, f = solve_resamples(fit.design, weights, start=fit.law)
        seconds = min(seconds, time.process_time() - start)
    own = np.array([solve(fit.design, weights=row, n_starts=STARTS).objective for row in weights])
    above = f / own - 1
    return {
        "resamples": RESAMPLES,
        "cpu_s": seconds,
        "worst_above_own_optimum": float(above.max()),
        "within_1e-9": int(np.sum(above <= 1e-9)),
        "below_own_optimum": int(np.sum(above < -1e-9)),
    }


def _print(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{x:.3g}" if isinstance(x, float) else f"{x}" for x in row.values()))
    Console(width=140).print(table)


def main() -> None:
    """Run both sections and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=Path, metavar="CSV")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--restarts", type=int, default=STARTS, metavar="N", help="of scipy")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    fits = compare_fits(options.points, options.restarts, options.repeats)
    _print(fits, f"{STARTS} starts, {options.restarts} restarts")
    drawn = resample(options.repeats)
    _print([drawn], "block resamples of the joint law")
    if options.json:
        options.json.write_text(json.dumps({"fits": fits, "resamples": drawn}, indent=2))


if __name__ == "__main__":
    main()
