"""`python -m training.tune --recipe NAME --out DIR`: whether a base learning rate holds at other widths and horizons.

The check of Schwethelm et al. 2026 (arXiv:2604.21106, appendix E): sweep one base rate at several widths with the
reference horizon, and at several horizons with the reference width, each for every r. Every run is an ordinary training
run in DIR, so finished ones are skipped, and --analyse reads what is there without training. Writes DIR/tune.csv (a row
a run), tune.json (a curve a condition; the method is described in curves.py) and tune.png. Exit status: 0 all runs
ended, 1 some failed, 2 bad input, 130 interrupted.
"""

import argparse
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from rich.console import Console

from hf_looped.accounting import executed_parameters

from .config import ModelConfig, OptimizerConfig, TrainingConfig, TransferConfig, read_yaml, resolve
from .costs import MFU, PEAK_FLOPS, needs, plan_table
from .curves import Condition, UCurve, curve_table, fit, verdict
from .files import write_text
from .grid import plan
from .messages import say
from .record import architecture_of
from .sweep import run_grid

RECIPES = Path(__file__).parent / "recipes"
RATES = tuple(f.name for f in fields(OptimizerConfig) if f.name.endswith("_lr"))
FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
WIDTHS = (0.8, 1.0, 1.4)  # of the reference width, as the paper's s = 8, 10, 14
HORIZONS = (0.5, 1.0, 2.0)  # of the reference horizon
OWN = (
    *("out", "run_id", "variant", "seed", "steps", "budget_flops"),
    *("model.hidden_size", "model.recurrences"),
)  # set by the sweep's own options
# What a run's name says, written by `_name`; rate, width, r and seed stand in its record too.
NAME = re.compile(r"(?P<rate>\w+)-r\d+-d\d+-h(?P<horizon>[\d.e+-]+)-x(?P<factor>[\d.e+-]+)-seed\d+")

Number = TypeVar("Number", int, float)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, plan, run, analyse."""
    options = _parser().parse_intermixed_args(arguments)
    console = Console(stderr=True)
    # Both end the sweep with all states saved, also where a shell started it with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        rate, out = _rate(options.field), Path(options.out)
        status = 0
        if not options.analyse:
            if options.jobs is not None and options.jobs < 1:
                raise ValueError(f"--jobs is {options.jobs}: at least one run at a time is needed.")
            runs = plan(star(options, rate))
            launch = torch.cuda.is_available()
            jobs = 1 if launch else options.jobs or os.cpu_count() or 1
            console.print(plan_table(runs, jobs))
            say(console, needs(runs, jobs, MFU, PEAK_FLOPS))
            if options.dry_run:
                return 0
            status = run_grid(runs, out, jobs, launch, console, retry_failed=options.retry_failed)
        analyse(out, rate, console)
        return status
    except (ValueError, OSError) as error:
        say(console, f"error: {error}", style="red")
        return 2
    except KeyboardInterrupt:
        say(console, "Interrupted. What ran is saved; the same command goes on from there.")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.tune",
        description="Sweep a base learning rate over widths and horizons, and say what the recipe's own loses.",
    )
    add = parser.add_argument
    add("--recipe", metavar="NAME", help="a recipe of training/recipes, or a YAML file")
    add("--out", required=True, metavar="DIR", help="folder of the runs, their data and results")
    add("--widths", metavar="N,…", help="channels (default: 0.8, 1, 1.4 times the reference width)")
    add(
        "--horizons",
        metavar="X,…",
        help="tokens per executed parameter (default: 0.5, 1, 2 times the reference's)",
    )
    add("--recurrences", metavar="N,…", help="(default: 1 and the reference's)")
    add(
        "--factors", metavar="X,…", help="on the base rate, 1 among them (default: 0.5,0.7,1,1.4,2)"
    )
    add(
        "--field",
        default="optimizer.muonh_lr",
        metavar="NAME",
        help="the base rate swept (default: optimizer.muonh_lr)",
    )
    add("--seeds", default="0", metavar="N,…", help="seeds of every run (default: 0)")
    add("--jobs", type=int, metavar="N", help="runs at a time on CPUs (default: one per core)")
    add("--retry-failed", action="store_true", help="try again what failed before")
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--analyse", action="store_true", help="analyse the runs in DIR without training")
    add("fields", nargs="*", metavar="field=value", help="override the recipe")
    return parser


def star(options: argparse.Namespace, rate: str) -> list[TrainingConfig]:
    """Recipes of all runs: widths at the reference horizon, then horizons at the reference width, for every r.

    Raises
    ------
    ValueError
        For a list without meaning (see the messages), or a run that has no valid recipe.
    """
    recipe = _recipe(options.recipe)
    for override in options.fields:
        if override.partition("=")[0] in OWN:
            raise ValueError(
                f"{override}: the sweep sets this field itself, by its own options; leave it out."
            )
    source = read_yaml(recipe)
    base = _resolve(recipe, source, {}, options.fields)
    if base.init_from is not None:
        raise ValueError(
            f"init_from is {base.init_from!r}: a sweep over widths trains from scratch; leave it out."
        )
    transfer = base.transfer
    widths = _numbers("--widths", options.widths, int) or _default_widths(base.model, transfer)
    horizons = _numbers("--horizons", options.horizons, float) or [
        factor * transfer.tokens_per_parameter for factor in HORIZONS
    ]
    recurrences = _numbers("--recurrences", options.recurrences, int) or sorted(
        {1, transfer.reference_recurrences}
    )
    factors = _numbers("--factors", options.factors, float) or list(FACTORS)
    seeds = _numbers("--seeds", options.seeds, int, least=0)
    if len(factors) < 3 or 1 not in factors:
        raise ValueError(
            f"--factors is {options.factors}: at least three factors are needed for a curve, and 1, the base rate "
            "itself, among them."
        )
    conditions = [
        Condition(r, width, transfer.tokens_per_parameter) for r in recurrences for width in widths
    ]
    conditions += [
        Condition(r, transfer.reference_width, horizon) for r in recurrences for horizon in horizons
    ]
    return [
        config
        for condition in dict.fromkeys(conditions)
        for config in _runs(recipe, source, condition, rate, factors, seeds, options)
    ]


def _runs(
    recipe: Path,
    source: dict[str, Any],
    condition: Condition,
    rate: str,
    factors: list[float],
    seeds: list[int],
    options: argparse.Namespace,
) -> list[TrainingConfig]:
    """Recipes of one condition's runs; tokens are its horizon times the executed parameters of its own model."""
    model = {"recurrences": condition.recurrences, "hidden_size": condition.hidden_size}
    base = _resolve(recipe, source, {"model": model}, options.fields, str(condition))
    tokens = condition.tokens_per_parameter * executed_parameters(architecture_of(base))
    steps = round(tokens / base.batch_tokens)
    if steps < 1:
        raise ValueError(
            f"{condition}: {tokens:,.0f} tokens are less than one step of batch_tokens = {base.batch_tokens:,}. Raise "
            "--horizons or lower the batch."
        )
    return [
        replace(
            base,
            out=options.out,
            run_id=_name(rate, condition, factor, seed),
            variant="tune",
            seed=seed,
            steps=steps,
            optimizer=replace(base.optimizer, **{rate: factor * getattr(base.optimizer, rate)}),
        )
        for factor in factors
        for seed in seeds
    ]


def _name(rate: str, condition: Condition, factor: float, seed: int) -> str:
    r, width, horizon = condition
    return f"{rate}-r{r}-d{width}-h{horizon:.12g}-x{factor:.12g}-seed{seed}"


def _resolve(
    recipe: Path,
    source: dict[str, Any],
    cell: dict[str, Any],
    overrides: Sequence[str],
    where: str = "",
) -> TrainingConfig:
    """Resolve the recipe with its size of one step, and with a condition's model."""
    merged = source | {"budget_flops": None, "steps": 1, "run_id": "tune"}
    merged["model"] = source.get("model", {}) | cell.get("model", {})
    return resolve(merged, overrides, source=f"{recipe.name}, {where}" if where else recipe.name)


def _recipe(name: str | None) -> Path:
    path = Path(name) if name and name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if name is None or not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise ValueError(
            f"--recipe is {name!r}: no such recipe. Use one of {known}, or the path of a YAML file."
        )
    return path


def _rate(field: str) -> str:
    """Name of the rate in `OptimizerConfig`."""
    section, _, rate = field.partition(".")
    if section != "optimizer" or rate not in RATES:
        known = ", ".join(f"optimizer.{name}" for name in RATES)
        raise ValueError(f"--field is {field!r}: it must be a base learning rate: {known}.")
    return rate


def _numbers(
    option: str, text: str | None, kind: Callable[[str], Number], least: int | None = None
) -> list[Number]:
    """Different numbers of a list such as 32,48, ascending; all positive, or at least `least`. Nothing if not given."""
    if text is None:
        return []
    try:
        values = sorted({kind(part) for part in text.split(",")})
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} is {text!r}: give {what} between commas.") from error
    if not all(math.isfinite(value) and (value > 0 or value == least) for value in values):
        rule = "positive and finite" if least is None else f"at least {least}"
        raise ValueError(f"{option} is {text!r}: every number must be {rule}.")
    return values


def _default_widths(model: ModelConfig, transfer: TransferConfig) -> list[int]:
    """Multiples of the head size near the paper's ratios to the reference width."""
    size = model.head_dim
    return sorted({max(1, round(x * transfer.reference_width / size)) * size for x in WIDTHS})


def analyse(out: Path, rate: str, console: Console) -> dict[Condition, UCurve]:
    """Fit the curves of the runs in `out` that swept this rate, write the three files, and print table and verdict.

    Raises
    ------
    ValueError
        If no such run has ended, or the runs differ in base rate, reference point or validation text.
    """
    runs, reference = read_runs(out, rate)
    runs.to_csv(out / "tune.csv", index=False)
    ended = runs[runs["status"].isin(["finished", "diverged"])]
    if len(ended) < len(runs):
        others = runs["status"].value_counts().drop(["finished", "diverged"], errors="ignore")
        counts = ", ".join(f"{count} {status}" for status, count in others.items())
        say(console, f"{counts}: not in the curves.", style="yellow")
    if ended.empty:
        raise ValueError(f"{out}: none of its {len(runs)} runs of {rate} has ended; train first.")
    base = float(ended["base"].iloc[0])
    curves = {}
    keys = ["recurrences", "hidden_size", "tokens_per_parameter"]
    for _, cell in ended.groupby(keys, sort=True):
        losses = cell["val_loss"].where(cell["status"] == "finished")
        r, width, horizon = (cell[key].iloc[0] for key in keys)
        condition = Condition(int(r), int(width), float(horizon))
        curves[condition] = fit(cell["base_rate"].tolist(), losses.tolist(), base)
    sentence = verdict(f"optimizer.{rate}", curves)
    result = {
        "field": f"optimizer.{rate}",
        "base": base,
        "verdict": sentence,
        "conditions": [
            condition._asdict()
            | asdict(curve)
            | {"measured_regret": curve.measured_regret, "above_noise": curve.above_noise}
            for condition, curve in curves.items()
        ],
    }
    write_text(out / "tune.json", json.dumps(result, indent=1))
    from .tune_plot import sweep_figure  # the only place that needs matplotlib

    sweep_figure(curves, reference, f"optimizer.{rate}").savefig(out / "tune.png", dpi=150)
    console.print(curve_table(f"optimizer.{rate}", curves))
    say(console, sentence)
    return curves


def read_runs(out: Path, rate: str) -> tuple[pd.DataFrame, tuple[int, float]]:
    """Read a row for each run in `out` that swept `rate`, from its record and its recipe, and the reference point.

    That is the width and the horizon (tokens per executed parameter) that the others were varied around.
    """
    rows, recipes, validation = [], [], set()
    for path in sorted(out.glob("*/run.json")):
        match = NAME.fullmatch(path.parent.name)
        if match is None or match["rate"] != rate:
            continue
        record, recipe = json.loads(path.read_text()), read_yaml(path.parent / "config.yaml")
        value, factor = recipe["optimizer"][rate], float(match["factor"])
        rows.append(
            {
                "run_id": record["run_id"],
                "status": record["status"],
                "recurrences": record["recurrences"],
                "hidden_size": record["hidden_size"],
                "tokens_per_parameter": float(match["horizon"]),
                "seed": record["seed"],
                "factor": factor,
                "base_rate": value,
                "base": value / factor,
                "tokens": record["tokens"],
                "steps": record["steps"],
                "total_flops": record["total_flops"],
                "val_loss": record.get("val_loss"),
                "wall_s": record.get("wall_s"),
            }
        )
        recipes.append(recipe["transfer"])
        validation.add(record.get("val_fingerprint"))
    if not rows:
        raise ValueError(
            f"{out} holds no runs of optimizer.{rate}; give the folder of a sweep, or --field."
        )
    bases = {row["base"] for row in rows}
    if not math.isclose(min(bases), max(bases), rel_tol=1e-9):
        raise ValueError(
            f"{out} holds runs around different base rates ({min(bases):g} to {max(bases):g}): one folder a sweep."
        )
    if len(validation) > 1 or any(recipe != recipes[0] for recipe in recipes):
        raise ValueError(
            f"{out} holds runs of different data or reference points, whose losses don't compare: one folder a sweep."
        )
    transfer = TransferConfig(**recipes[0])
    return pd.DataFrame(rows), (transfer.reference_width, transfer.tokens_per_parameter)


if __name__ == "__main__":
    sys.exit(main())
