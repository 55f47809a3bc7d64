"""Two run tables made comparable: the budgets they share, the unlooped runs, one way to split.

φ says what a recurrence is worth beside the unlooped runs (r = 1) of its own table. A variant of the
loop leaves them as they are, so that a table without them takes the baseline's. Symbols: r
recurrences, N parameters (count), C budget in FLOPs.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ..runs.split import split_parameters
from ..runs.table import RunTable
from ..solver.laws import FloatArray

_SAME_BUDGET = 1e-6  # relative; nominal budgets differ by rounding at most
_ORDER = ["budget_flops", "r", "n", "tokens", "loss"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Two tables at their shared budgets, rows in one fixed order.

    n_reused: r = 1 runs of the baseline that stand in the variant's table. notes: sentences on
    what was reused and what differs beside the loop.
    """

    baseline: RunTable
    variant: RunTable
    budgets: tuple[float, ...]
    n_reused: int
    notes: tuple[str, ...]

    @property
    def cells_match(self) -> bool:
        """Whether both tables hold runs in the same (budget, r) cells."""
        return cells(self.baseline.runs) == cells(self.variant.runs)

    @property
    def identical(self) -> bool:
        """Whether every run of the variant is one of the baseline's, whatever its name and split."""
        names = ["budget_flops", "r", "n", "tokens", "loss"]
        one, other = (
            set(map(tuple, table.runs[names].to_numpy(dtype=float)))
            for table in (self.baseline, self.variant)
        )
        return other <= one

    def on_shared_cells(self) -> "Pair":
        """Only the runs in (budget, r) cells that both tables hold."""
        shared = cells(self.baseline.runs) & cells(self.variant.runs)
        baseline, variant = (
            table.where([cell in shared for cell in _cell_of(table.runs)])
            for table in (self.baseline, self.variant)
        )
        return replace(self, baseline=baseline, variant=variant)


def cells(runs: pd.DataFrame) -> set[tuple[float, int]]:
    """Collect the (budget_flops, r) cells of a table."""
    return set(_cell_of(runs))


def _cell_of(runs: pd.DataFrame) -> list[tuple[float, int]]:
    return [(float(c), int(r)) for c, r in zip(runs["budget_flops"], runs["r"], strict=True)]


def variant_table(frame: pd.DataFrame, baseline: RunTable, *, loss: str | None = None) -> RunTable:
    """Check a variant's run table and give it the baseline's kind of split.

    A variant without r = 1 runs takes the baseline's into its regression split, so that one with
    a single r > 1 has a split, too. `loss` defaults to the baseline's. Raises ValueError as
    `RunTable.of` does.
    """
    table = RunTable.of(frame, split="text", loss=loss or baseline.loss)
    if baseline.split == "text":
        return table
    if baseline.split == "regression" and not (table.runs["r"] == 1).any():
        return _regressed(replace(table, split="regression"), _unlooped(baseline))
    return RunTable.of(frame, split=baseline.split, loss=table.loss)


def pair_up(baseline: RunTable, variant: RunTable) -> Pair:
    """Bring both tables to the budgets at which both have looped runs.

    Without r = 1 runs of its own the variant takes the baseline's, which keep the split of their
    own table; the variant's regression split then includes them. Raises ValueError for tables
    that differ in split, loss, vocabulary or validation set, or share fewer than two budgets.
    """
    _refuse_unlike(baseline, variant)
    variant = _snapped(variant, baseline.budgets())
    budgets = _shared_budgets(baseline, variant)
    notes = _differences(baseline, variant)
    unlooped = _unlooped(baseline)
    n_reused = 0
    own = variant.where((variant.runs["r"] == 1) & variant.runs["budget_flops"].isin(budgets))
    if len(own):
        variant, same = _keeping_split(variant, unlooped)
        notes.append(_own_unlooped(len(own), same, budgets, own))
    else:
        reused = unlooped.where(unlooped.runs["budget_flops"].isin(budgets))
        n_reused = len(reused)
        variant = _with_runs(_regressed(variant, unlooped), reused, baseline.source)
        notes.append(
            f"the variant has no r = 1 runs of its own at the shared budgets: {n_reused} of the "
            "baseline's were reused, with the split they have there"
            if n_reused
            else "no table has r = 1 runs at the shared budgets: φ compares looped models of "
            "different r alone"
        )
    shown = [_at(table, budgets) for table in (baseline, variant)]
    return Pair(
        baseline=shown[0],
        variant=shown[1],
        budgets=tuple(budgets),
        n_reused=n_reused,
        notes=tuple(notes),
    )


def _unlooped(table: RunTable) -> RunTable:
    return table.where(table.runs["r"] == 1)


def _at(table: RunTable, budgets: list[float]) -> RunTable:
    """Keep the runs at these budgets, in an order that names and files have no part in."""
    kept = table.where(table.runs["budget_flops"].isin(budgets))
    runs = kept.runs.sort_values(_ORDER, kind="stable").reset_index(drop=True)
    return replace(kept, runs=runs)


def _refuse_unlike(baseline: RunTable, variant: RunTable) -> None:
    both = f"{baseline.source} and {variant.source}"
    for name, one, other in (
        ("split", baseline.split, variant.split),
        ("loss", baseline.loss, variant.loss),
    ):
        if one != other:
            raise ValueError(
                f"{both}: {name} is {one!r} in one and {other!r} in the other, so that φ would mean "
                f"two things. Read both with the same {name}."
            )
    for table in (baseline, variant):
        if "budget_flops" not in table.runs or table.runs["budget_flops"].isna().any():
            raise ValueError(
                f"{table.source}: budget_flops is missing for some runs, but tables are compared at "
                "equal budgets. Add the compute budget of every run, in FLOPs."
            )
        if not (table.runs["r"] > 1).any():
            raise ValueError(
                f"{table.source}: no run has recurrences > 1, so that it says nothing of a loop. "
                "Add looped runs."
            )
    measured = {
        "vocab_size": "different vocabularies",
        "val_fingerprint": "different validation sets",
        "corpus_fingerprint": "models trained on different corpora",
    }
    for name, what in measured.items():
        if name == "val_fingerprint" and baseline.loss != "val_loss":
            continue
        here, there = _values(baseline, name), _values(variant, name)
        if here and there and here != there:
            raise ValueError(
                f"{both}: {name} is {' and '.join(sorted(here))} in one and "
                f"{' and '.join(sorted(there))} in the other: losses per token of {what} cannot be "
                "compared. Train both on one corpus, and evaluate on one set with one tokenizer."
            )


def _values(table: RunTable, name: str) -> set[str]:
    if name not in table.runs:
        return set()
    found = table.runs[name].dropna().unique()
    return {f"{value:g}" if isinstance(value, float) else str(value) for value in found}


def _snapped(variant: RunTable, budgets: list[float]) -> RunTable:
    """Give budgets that differ from one of the baseline's by rounding alone that one's value."""
    own = variant.runs["budget_flops"].to_numpy(dtype=float)
    known = np.array(budgets)
    nearest = known[np.argmin(np.abs(np.log(own[:, None] / known)), axis=1)]
    close = np.abs(own / nearest - 1) <= _SAME_BUDGET
    runs = variant.runs.assign(budget_flops=np.where(close, nearest, own))
    return replace(variant, runs=runs)


def _shared_budgets(baseline: RunTable, variant: RunTable) -> list[float]:
    one, other = (
        sorted(float(c) for c in table.runs.loc[table.runs["r"] > 1, "budget_flops"].unique())
        for table in (baseline, variant)
    )
    shared = [budget for budget in one if budget in other]
    if len(shared) >= 2:
        return shared
    first, second = (", ".join(f"{c:.6g}" for c in budgets) for budgets in (one, other))
    found = f"share the budget {shared[0]:.6g} alone" if shared else "share no budget"
    why = (
        "one budget ties tokens to parameters, so that α, β and E cannot be told apart"
        if shared
        else "φ is compared at equal budgets"
    )
    raise ValueError(
        f"{baseline.source} has looped runs at C = {first} FLOPs, {variant.source} at {second}: they "
        f"{found}, but two are needed ({why}). Run the variant at budgets of the baseline."
    )


def _differences(baseline: RunTable, variant: RunTable) -> list[str]:
    """Name what differs beside the loop: such a Δφ is not the loop's alone."""
    out = []
    for name, what in (
        ("data_fingerprint", "training data"),
        ("recipe_sha256", "training recipe (data, batch or rates)"),
        ("sequence_length", "sequence length"),
    ):
        one, other = _values(baseline, name), _values(variant, name)
        if one and other and one != other:
            out.append(f"the tables differ in {what} ({name}): Δφ is not the loop's alone")
    return out


def _own_unlooped(count: int, same: int, budgets: list[float], own: RunTable) -> str:
    missing = sorted(set(budgets) - set(own.budgets()))
    text = (
        f"the variant table's own {count} r = 1 runs were used"
        if same < count
        else f"the variant table's {count} r = 1 runs are the baseline's and keep their split"
    )
    if 0 < same < count:
        text += f" ({same} of them are the baseline's)"
    if missing:
        text += f"; it has none at C = {', '.join(f'{c:.4g}' for c in missing)}"
    return text


def _keeping_split(variant: RunTable, unlooped: RunTable) -> tuple[RunTable, int]:
    """Give r = 1 rows that are the baseline's the split they have there; count those."""
    names = ["budget_flops", "n", "tokens", "loss"]
    known = {
        tuple(key): (once, rec)
        for key, once, rec in zip(
            unlooped.runs[names].to_numpy(dtype=float),
            unlooped.runs["n_once"],
            unlooped.runs["n_rec"],
            strict=True,
        )
    }
    runs = variant.runs.copy()
    keys = [tuple(key) for key in runs[names].to_numpy(dtype=float)]
    rows = [i for i, key in enumerate(keys) if runs["r"].iloc[i] == 1 and key in known]
    for i in rows:
        runs.loc[runs.index[i], ["n_once", "n_rec"]] = known[keys[i]]
    return replace(variant, runs=runs), len(rows)


def _regressed(variant: RunTable, unlooped: RunTable) -> RunTable:
    """Repeat the regression split on the variant's whole table with the reused r = 1 runs."""
    if variant.split != "regression" or not len(unlooped):
        return variant
    columns = [name for name in variant.runs if name in unlooped.runs]
    sizes = [name for name in ("hidden_size", "effective_depth") if name in columns]
    ours = set(variant.runs[sizes].itertuples(index=False, name=None))
    same = [size in ours for size in unlooped.runs[sizes].itertuples(index=False, name=None)]
    frame = pd.concat([variant.runs[columns], unlooped.runs.loc[same, columns]], ignore_index=True)
    frame = frame.assign(n_once=frame["n"], n_rec=0.0)  # the regression knows the sum alone
    frame.attrs["source"] = f"{variant.source} with the r = 1 runs of {unlooped.source}"
    split: tuple[FloatArray, FloatArray] = split_parameters(frame, "regression")
    own = len(variant.runs)
    return replace(variant, runs=variant.runs.assign(n_once=split[0][:own], n_rec=split[1][:own]))


def _with_runs(variant: RunTable, reused: RunTable, source: str) -> RunTable:
    if not len(reused):
        return variant
    runs = pd.concat([variant.runs, reused.runs], ignore_index=True)
    return replace(variant, runs=runs, source=f"{variant.source} with r = 1 of {source}")
