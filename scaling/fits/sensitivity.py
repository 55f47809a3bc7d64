"""How much φ depends on what counts as N_once and what as N_rec.

The split is a choice (`split`), and on the paper's runs φ moves by 0.04 between splits, 0.4 of its
interval's width: a report that names one φ owes the others. Symbols as in `laws`.
"""

from dataclasses import dataclass, replace

import pandas as pd

from ..record import Record
from ..runs.split import SPLITS
from ..runs.table import RunTable
from ..solver.solve import RANDOM_STARTS
from ..text import NONE, bullets, markdown_table, wrap
from .bootstrap import RESAMPLES, bootstrap
from .fit import fit_joint

WITHOUT = "without injection"
MEANINGS = {
    **SPLITS,
    WITHOUT: "the injection's parameters count nowhere (n_injection taken from n_rec)",
}


@dataclass(frozen=True, kw_only=True)
class SplitRow(Record):
    """The joint law under one split; what could not be computed is None, and `reason` says why.

    interval: 95 % block bootstrap of φ. r2, rmse: in nats on loss.
    """

    split: str
    meaning: str
    phi: float | None
    interval: tuple[float, float] | None
    alpha: float | None
    beta: float | None
    E: float | None
    r2: float | None
    rmse: float | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class SplitSensitivity(Record):
    """φ under every split. spread: largest minus smallest φ; None with fewer than two."""

    loss: str
    rows: tuple[SplitRow, ...]
    spread: float | None

    @property
    def widest(self) -> float | None:
        """Width of the widest interval of φ; None where no split has one."""
        widths = [one.interval[1] - one.interval[0] for one in self.rows if one.interval]
        return max(widths) if widths else None


def split_sensitivity(
    frame: pd.DataFrame,
    *,
    loss: str = "val_loss",
    delta: float = 1e-3,
    n_starts: int = RANDOM_STARTS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> SplitSensitivity:
    """Fit the joint law to one run table under every split, the same runs each time.

    `frame` as `runs.read_table` returns it: the columns of the regression and n_injection are
    needed for their splits only. Raises ValueError when the table is unfit for every fit.
    """
    RunTable.of(frame, loss=loss)  # what is wrong with the table is wrong under every split
    rows = tuple(_row(frame, name, loss, delta, n_starts, resamples, seed) for name in MEANINGS)
    found = [row.phi for row in rows if row.phi is not None]
    return SplitSensitivity(
        loss=loss, rows=rows, spread=max(found) - min(found) if len(found) > 1 else None
    )


def under_split(frame: pd.DataFrame, split: str, loss: str = "val_loss") -> RunTable:
    """Apply a split, "without injection" among them. Raises ValueError as `split_parameters` does."""
    if split != WITHOUT:
        return RunTable.of(frame, split=split, loss=loss)
    text = RunTable.of(frame, loss=loss)
    rest = _without(text.runs, text.source)
    return replace(text, runs=text.runs.assign(n_rec=rest), split=WITHOUT)


def _without(runs: pd.DataFrame, source: str) -> "pd.Series[float]":
    """N_rec less the injection."""
    if "n_injection" not in runs or runs["n_injection"].isna().any():
        raise ValueError(
            f"{source}: n_injection is missing for some runs, but the split without injection "
            "needs it. Fill it in."
        )
    rest = runs["n_rec"] - runs["n_injection"].astype(float)
    nothing = runs["n_once"] + rest <= 0
    if nothing.any():
        raise ValueError(
            f"{source}, run {runs.loc[nothing, 'run_id'].iloc[0]}: n_injection is all of the model's "
            "parameters, so that nothing is left without it. Check n_injection."
        )
    return rest


def _row(
    frame: pd.DataFrame,
    split: str,
    loss: str,
    delta: float,
    n_starts: int,
    resamples: int,
    seed: int,
) -> SplitRow:
    try:
        fit = fit_joint(under_split(frame, split, loss), delta=delta, n_starts=n_starts)
    except ValueError as error:
        return SplitRow(
            split=split,
            meaning=MEANINGS[split],
            phi=None,
            interval=None,
            alpha=None,
            beta=None,
            E=None,
            r2=None,
            rmse=None,
            reason=str(error),
        )
    drawn = bootstrap(fit, resamples=resamples, seed=seed)
    known = drawn.low is not None and drawn.high is not None
    return SplitRow(
        split=split,
        meaning=MEANINGS[split],
        phi=fit.law.phi,
        interval=(float(drawn.low), float(drawn.high)) if known else None,  # type: ignore[arg-type]
        alpha=fit.law.alpha,
        beta=fit.law.beta,
        E=fit.law.E,
        r2=fit.r2,
        rmse=fit.rmse,
        reason=None if known else f"no interval: {drawn.reason}",
    )


def render_sensitivity(found: SplitSensitivity) -> str:
    """Write the table, what each split means, and one sentence on the spread."""
    header = ["split", "φ", "95 % interval", "R²", "RMSE, nats", "α", "β", "E"]
    notes = [f"{row.split}: {row.meaning}" for row in found.rows]
    notes += [f"{row.split}: {row.reason}" for row in found.rows if row.reason is not None]
    rows = [[row.split, *_cells(row)] for row in found.rows]
    return "\n\n".join([markdown_table(header, rows), bullets(notes), wrap(says(found))])


def _cells(row: SplitRow) -> list[str]:
    if row.phi is None:
        return [NONE] * 7
    interval = f"[{row.interval[0]:.3f}, {row.interval[1]:.3f}]" if row.interval else NONE
    fitted = (row.r2, row.rmse, row.alpha, row.beta, row.E)
    return [f"{row.phi:.4f}", interval, *(f"{value:.4f}" for value in fitted)]


def says(found: SplitSensitivity) -> str:
    """One sentence: how far φ moves between splits, beside how wide its interval is."""
    if found.spread is None:
        return "Fewer than two splits could be computed: how φ depends on the split is not known."
    text = f"φ moves by {found.spread:.3f} between the splits"
    if found.widest is None:
        return f"{text}; name the split with every φ."
    share = found.spread / found.widest
    return (
        f"{text}, {share:.1f} × the width of its widest interval ({found.widest:.3f}): the choice "
        "of split is an uncertainty of its own that no interval covers."
    )
