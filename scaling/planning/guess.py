"""From command-line options to what a forecast assumes: law, noise, architectures and grid.

Every refusal names the option, its value, the rule and the remedy.
"""

import argparse
from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np

from ..fits.fit import JointFit, fit_joint
from ..optima.frontier import Architecture, architectures
from ..runs.table import RunTable
from ..solver.laws import JointLaw
from .design import (
    PAPER_GRID,
    PAPER_LAW,
    PAPER_SPLIT,
    Grid,
    grid_of,
    iso_depth,
    widths_around_optimum,
)
from .noise import Noise
from .planned import Guess

_LAW = ("E", "A", "alpha", "B", "beta", "phi")
_LOWEST, _HIGHEST = -1.0, 2.0  # of φ: well inside the solver's ±3
_FAMILY = ("effective_depth", "shared_depth", "sequence_length", "vocab_size")
_GRID = ("like", "budgets", "widths", "recurrences")


def guess_of(options: argparse.Namespace) -> Guess:
    """Read the options of `plan.add_arguments`. Raises ValueError for numbers that make no grid."""
    if options.paper:
        _refuse_beside(options, "--paper", _GRID, "the paper's grid is complete")
    fit = None if options.like is None else _fitted(options)
    law = _law(options, PAPER_LAW if fit is None else fit.law)
    default = PAPER_GRID if fit is None else grid_of(fit.runs)
    chosen = default.recurrences
    if options.recurrences is not None:
        chosen = _whole("--recurrences", options.recurrences, "1 2 4 8")
    if len(chosen) < 2:
        raise ValueError(
            f"--recurrences names r = {chosen[0]} alone, but φ says how runs of different r compare. "
            "Give two or more, for example 1 2 4 8."
        )
    family = _family(options, chosen, fit)
    return Guess(
        law=law,
        noise=_noise(options, fit),
        family=family,
        grid=_grid(options, default, chosen, law, family),
        source=_source(options),
    )


def _source(options: argparse.Namespace) -> str:
    own = any(getattr(options, name) is not None for name in ("budgets", "widths", "recurrences"))
    if options.like is not None:
        return f"{'a grid like' if own else 'the grid of'} {options.like}"
    return "the grid given" if own else "the paper's grid"


def _refuse_beside(options: argparse.Namespace, flag: str, others: Sequence[str], why: str) -> None:
    given = [name for name in others if getattr(options, name) is not None]
    if given:
        name = f"--{given[0].replace('_', '-')}"
        raise ValueError(f"{flag} and {name} exclude each other: {why}. Leave one of them out.")


def _fitted(options: argparse.Namespace) -> JointFit:
    _refuse_beside(options, "--like", _FAMILY, "the table holds the architectures' counts")
    split = "text" if options.split is None else options.split
    return fit_joint(RunTable.read(options.like, split=split, loss=options.loss))


def _law(options: argparse.Namespace, default: JointLaw) -> JointLaw:
    law = default
    if options.law is not None:
        try:
            law = JointLaw(**dict(zip(_LAW, map(float, options.law), strict=True)))
        except ValueError as error:
            raise ValueError(
                f"--law is {' '.join(options.law)}: {str(error).rstrip('.')}. Give E A ALPHA B BETA "
                f"PHI; the paper's is {' '.join(f'{value:g}' for value in astuple(PAPER_LAW))}."
            ) from error
    if options.phi is not None:
        law = replace(law, phi=_exponent("--phi is", options.phi))
    if options.delta_phi is not None:
        _exponent(f"--delta-phi is {options.delta_phi:g}, φ + Δφ", law.phi + options.delta_phi)
    return law


def _exponent(what: str, phi: float) -> float:
    if not _LOWEST <= phi <= _HIGHEST:
        raise ValueError(
            f"{what} {phi:g}, but φ must lie between {_LOWEST:g} and {_HIGHEST:g}: 0 says that "
            "recurrences add nothing, 1 that each is worth a layer of its own. The paper's is 0.459."
        )
    return phi


def _noise(options: argparse.Namespace, fit: JointFit | None) -> Noise:
    for flag, value in (("--noise-run", options.noise_run), ("--noise-cell", options.noise_cell)):
        if value is not None and not (np.isfinite(value) and value >= 0):
            raise ValueError(
                f"{flag} is {value:g}, but must be a standard deviation in nats, at least 0. The paper's "
                "are 0.009 (run) and 0.005 (cell)."
            )
    if options.noise_run is not None and options.noise_cell is not None:
        return Noise(run=options.noise_run, cell=options.noise_cell)
    found = Noise() if fit is None else Noise.of(fit)
    return Noise(
        run=found.run if options.noise_run is None else options.noise_run,
        cell=found.cell if options.noise_cell is None else options.noise_cell,
    )


def _family(
    options: argparse.Namespace, recurrences: tuple[int, ...], fit: JointFit | None
) -> tuple[Architecture, ...]:
    if fit is None:
        given = {name: getattr(options, name) for name in _FAMILY}
        numbers = {name: value for name, value in given.items() if value is not None}
        split = PAPER_SPLIT if options.split is None else options.split
        return iso_depth(recurrences, split=split, **numbers)
    found, reasons = architectures(fit.runs)
    absent = [r for r in recurrences if r not in {one.r for one in found}]
    if absent:
        known = ", ".join(f"{one.r}" for one in found) or "none"
        reason = reasons.get(absent[0], f"the table has runs of r = {known}")
        raise ValueError(
            f"--like {options.like}: no counts for r = {absent[0]}: {reason}. Leave that r out "
            "(--recurrences), or mend the table."
        )
    return found


def _grid(
    options: argparse.Namespace,
    default: Grid,
    recurrences: tuple[int, ...],
    law: JointLaw,
    family: tuple[Architecture, ...],
) -> Grid:
    budgets = default.budgets
    if options.budgets is not None:
        budgets = _positive("--budgets", options.budgets, "1e18 2e18 4e18")
    if len(budgets) < 2:
        raise ValueError(
            f"--budgets is {budgets[0]:g} alone, but at one budget the tokens follow from the width, so "
            "that their terms cannot be told apart. Give two or more."
        )
    if options.widths is not None:
        widths = _widths(options.widths, len(budgets))
    elif options.budgets is None:
        widths = default.widths
    else:
        used = [one for one in family if one.r in recurrences]
        widths = tuple(widths_around_optimum(law, used, budget) for budget in budgets)
    return Grid(budgets=budgets, widths=widths, recurrences=recurrences)


def _widths(texts: Sequence[str], n_budgets: int) -> tuple[tuple[int, ...], ...]:
    lists = [_whole("--widths", text.split(","), "384,512,640") for text in texts]
    if len(lists) not in (1, n_budgets):
        raise ValueError(
            f"--widths has {len(lists)} lists for {n_budgets} budgets, but needs one for all or one for "
            "each: numbers of one list are joined by commas, as in 384,512,640."
        )
    return tuple(lists * n_budgets if len(lists) == 1 else lists)


def _whole(flag: str, texts: Sequence[str], example: str) -> tuple[int, ...]:
    values = _positive(flag, texts, example)
    for value in values:
        if value != int(value):
            raise ValueError(
                f"{flag} has {value:g}, which is no whole number. Correct it, for example {example}."
            )
    return tuple(int(value) for value in values)


def _positive(flag: str, texts: Sequence[str], example: str) -> tuple[float, ...]:
    values: list[float] = []
    for text in texts:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (np.isfinite(value) and value > 0):
            raise ValueError(
                f"{flag} has {text!r}, but takes positive numbers. Correct it, for example {example}."
            )
        if values and value <= values[-1]:
            raise ValueError(
                f"{flag} has {text} after {values[-1]:g}, but takes ascending numbers, none twice. Sort "
                f"them, for example {example}."
            )
        values.append(value)
    return tuple(values)
