"""Grids of runs before anybody pays for them: which runs, which counts, how many FLOPs.

A grid crosses compute budgets C, hidden sizes d and recurrences r: tokens D = C / F(d), F training
FLOPs per token. Counts and FLOPs are the polynomials in d of `frontier.Architecture`, either of the
paper's iso-depth family (`iso_depth`) or of a table's own columns (`frontier.architectures`).
Source: Schwethelm et al. 2026 (arXiv:2604.21106), sections 3 and 4 and appendix C.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..optima.frontier import Architecture, architectures, optimum
from ..record import Record
from ..runs.split import split_parameters
from ..solver.laws import JointLaw

PAPER_LAW = JointLaw(E=1.56773, A=28.027, alpha=0.19924, B=915.82, beta=0.36863, phi=0.459)
PAPER_SPLIT = "regression"  # of the published law
_AROUND = (0.6, 0.77, 1.0, 1.3, 1.7)  # widths tried, as shares of the best one


@dataclass(frozen=True, kw_only=True)
class Grid(Record):
    """One run for every budget, width of that budget, and r.

    budgets: FLOPs, ascending. widths: hidden sizes of every budget, the same for each r.
    """

    budgets: tuple[float, ...]
    widths: tuple[tuple[int, ...], ...]
    recurrences: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse an empty, unordered or impossible grid."""
        if len(self.widths) != len(self.budgets):
            raise ValueError(
                f"Grid: {len(self.widths)} lists of widths for {len(self.budgets)} budgets. "
                "Give one list of widths for each budget."
            )
        for name, values in (
            ("budgets", self.budgets),
            *(
                (f"widths at {c:g} FLOPs", w)
                for c, w in zip(self.budgets, self.widths, strict=True)
            ),
            ("recurrences", self.recurrences),
        ):
            ordered = all(low < high for low, high in zip(values, values[1:], strict=False))
            if not values or not np.all(np.isfinite(values)) or min(values) <= 0 or not ordered:
                raise ValueError(
                    f"Grid: {name} are {list(values)}, but must be positive numbers in ascending "
                    "order, at least one and none twice. Correct them."
                )

    @property
    def n_runs(self) -> int:
        """Number of runs."""
        return len(self.recurrences) * sum(len(widths) for widths in self.widths)

    @property
    def n_cells(self) -> int:
        """Number of (budget, r) cells, the blocks of the bootstrap."""
        return len(self.recurrences) * len(self.budgets)

    @property
    def flops(self) -> float:
        """Training FLOPs of all runs together."""
        return self.flops_of(self.recurrences)

    def flops_of(self, recurrences: Sequence[int]) -> float:
        """Training FLOPs of the runs of these r."""
        sizes = [len(widths) for widths in self.widths]
        return len(recurrences) * float(np.dot(self.budgets, sizes))


def _multiples(*lists: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(64 * size for size in sizes) for sizes in lists)


PAPER_GRID = Grid(
    budgets=(4.64e17, 1e18, 2.15e18, 4.64e18, 1e19, 2.15e19),
    widths=_multiples(
        (6, 8, 10, 12),
        (6, 8, 10, 12, 14),
        (8, 10, 12, 14, 16),
        (10, 12, 14, 16, 18, 20),
        (12, 16, 18, 20, 24),
        (18, 24, 28, 34),
    ),
    recurrences=(1, 2, 4, 8),
)


def with_halfway_budgets(grid: Grid) -> Grid:
    """Add the geometric mean of every two neighbouring budgets, with the widths of both."""
    budgets, widths = list(grid.budgets[:1]), list(grid.widths[:1])
    for k in range(1, len(grid.budgets)):
        budgets += [float(np.sqrt(grid.budgets[k - 1] * grid.budgets[k])), grid.budgets[k]]
        both = {*grid.widths[k - 1], *grid.widths[k]}
        widths += [tuple(sorted(both)), grid.widths[k]]
    return Grid(budgets=tuple(budgets), widths=tuple(widths), recurrences=grid.recurrences)


def iso_depth(
    recurrences: Sequence[int],
    *,
    split: str = PAPER_SPLIT,
    effective_depth: int = 20,
    shared_depth: int = 16,
    sequence_length: int = 2048,
    vocab_size: int = 32064,
) -> tuple[Architecture, ...]:
    """Build the paper's family: each r executes `effective_depth` layers, `shared_depth` shared.

    A block has 12·d² parameters and 2·d gains, an injection 2·d²; r = 1 shares and injects
    nothing. Training FLOPs per token: 6·(parameters executed) + 12·d·T per executed layer +
    6·d·V. The split is taken over these recurrences together. Raises ValueError when an r does
    not divide `shared_depth`, or a number is no positive one.
    """
    numbers = {
        "shared_depth": shared_depth,
        "sequence_length": sequence_length,
        "vocab_size": vocab_size,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(
                f"{name} (--{name.replace('_', '-')}) is {value}, but must be a positive whole number. "
                "Correct it."
            )
    if effective_depth < shared_depth:
        raise ValueError(
            f"effective_depth (--effective-depth) is {effective_depth}, below shared_depth = "
            f"{shared_depth}, but a model executes at least the layers that it shares. Raise it, or lower "
            "shared_depth (--shared-depth)."
        )
    for r in recurrences:
        if r < 1 or shared_depth % r:
            raise ValueError(
                f"recurrences (--recurrences): {r} does not divide the {shared_depth} shared layers. Choose "
                f"divisors of {shared_depth}, or take the architectures from a run table."
            )
    width = np.array([256.0, 512.0, 1024.0])  # any three: the counts are polynomials in d
    parts = []
    for r in recurrences:
        layers = effective_depth if r == 1 else shared_depth // r
        once = 0 if r == 1 else effective_depth - shared_depth
        injection = 0.0 if r == 1 else 2 * width**2
        executed = effective_depth * (12 * width**2 + 2 * width) + r * injection
        attention = 12 * width * sequence_length * effective_depth
        parts.append(
            pd.DataFrame(
                {
                    "run_id": f"r{r}",
                    "r": r,
                    "recurrences": r,
                    "shared_depth": shared_depth,
                    "effective_depth": effective_depth,
                    "hidden_size": width,
                    "n_once": 12 * width**2 * once,
                    "n_rec": 12 * width**2 * layers + injection,
                    "n_injection": injection,
                    "train_flops_per_token": 6 * executed + attention + 6 * width * vocab_size,
                }
            )
        )
    runs = pd.concat(parts, ignore_index=True)
    runs.attrs["source"] = "the iso-depth family"
    n_once, n_rec = split_parameters(runs, split)
    n = runs["n_once"] + runs["n_rec"]
    return architectures(runs.assign(n_once=n_once, n_rec=n_rec, n=n))[0]


def planned_runs(grid: Grid, family: Sequence[Architecture]) -> pd.DataFrame:
    """List the grid's runs as a table without losses, with the columns of `table.RunTable.runs`.

    Raises ValueError when the family lacks an r of the grid.
    """
    by_r = {one.r: one for one in family}
    if len(by_r) < len(family):
        raise ValueError(
            "the family has several architectures with one r (other depths), but a grid has one "
            "for each. Keep the runs of one effective depth."
        )
    absent = [r for r in grid.recurrences if r not in by_r]
    if absent:
        raise ValueError(
            f"recurrences: the family has no architecture with r = {absent[0]} (it has "
            f"{', '.join(map(str, sorted(by_r)))}). Leave that r out, or give its counts."
        )
    rows = []
    for budget, widths in zip(grid.budgets, grid.widths, strict=True):
        for r in grid.recurrences:
            for d in widths:
                flops, n_once, n_rec = (float(value) for value in by_r[r].at(d))
                rows.append(
                    {
                        "run_id": f"C{budget:g}-r{r}-d{d}",
                        "r": r,
                        "n_once": n_once,
                        "n_rec": n_rec,
                        "n": float(by_r[r].parameters(d)),
                        "tokens": budget / flops,
                        "budget_flops": budget,
                        "hidden_size": float(d),
                        "train_flops_per_token": flops,
                    }
                )
    return pd.DataFrame(rows)


def grid_of(runs: pd.DataFrame) -> Grid:
    """Find the grid that a table of runs spans: per budget, every width that one of its r has, once.

    Raises ValueError without budget_flops or hidden_size.
    """
    for name in ("budget_flops", "hidden_size"):
        if name not in runs or runs[name].isna().any():
            raise ValueError(
                f"column {name} is missing for some runs, but a grid is made of budgets and "
                "widths. Fill it in, or give --budgets and --widths."
            )
    widths = runs.groupby("budget_flops", sort=True)["hidden_size"].unique()
    return Grid(
        budgets=tuple(float(budget) for budget in widths.index),
        widths=tuple(tuple(sorted(int(d) for d in found)) for found in widths),
        recurrences=tuple(sorted(int(r) for r in runs["r"].unique())),
    )


def widths_around_optimum(
    law: JointLaw, family: Sequence[Architecture], budget: float
) -> tuple[int, ...]:
    """Five widths around the compute-optimal one (geometric mean over the family's r) at C.

    Multiples of 64, the paper's step; of 32, 16 or 8 where the optimum is below 384.
    """
    found = [optimum(law, one, budget).hidden_size for one in family]
    if any(width is None for width in found):
        raise ValueError(
            f"budgets (--budgets): at {budget:g} FLOPs the law has no best width for some r. Give --widths."
        )
    best = float(np.exp(np.mean(np.log(np.array(found, dtype=float)))))
    step = next((step for step in (64, 32, 16) if best >= 6 * step), 8)
    return tuple(sorted({max(step, round(best * share / step) * step) for share in _AROUND}))
