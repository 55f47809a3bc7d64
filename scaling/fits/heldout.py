"""How well a law predicts runs that it was not fitted to, whole blocks of them left out.

Blocks are (budget, r) cells, or budgets: the runs of a block share what single runs left out would
hide (learning-rate transfer, rounding of steps). Losses in nats per token. Shapes: n runs, F blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from ..record import Record
from ..runs.table import RunTable
from ..solver.laws import FloatArray
from .candidates import Candidate


@dataclass(frozen=True, kw_only=True)
class HeldOut(Record):
    """Error on runs of blocks that were left out.

    mae: mean over blocks of the mean |predicted − observed|, rmse: over all runs, nats. worse: mae
    minus that of the law with the smallest, with a 95 % interval over blocks (paired, Student's t).
    """

    n_blocks: int
    mae: float
    rmse: float
    worse: float
    interval: tuple[float, float]

    @property
    def within_noise(self) -> bool:
        """Whether the blocks do not tell this law from the one with the smallest error."""
        return self.interval[0] <= 0


def held_out(
    laws: Sequence[Candidate], table: RunTable, keys: list[str]
) -> tuple[dict[str, HeldOut], dict[str, str]]:
    """Leave out each block in turn and refit: the error of every law, or the reason why it has none.

    keys: columns whose equal values make a block.
    """
    absent = "budget_flops" not in table.runs or table.runs["budget_flops"].isna().any()
    if absent:
        reason = "budget_flops is missing for some runs, so that no block can be left out"
        return {}, {law.name: reason for law in laws}
    blocks = np.asarray(table.runs.groupby(keys, sort=True).ngroup(), dtype=np.int64)
    if blocks.max() < 2:
        reason = f"{blocks.max() + 1} blocks ({', '.join(keys)}), but at least 3 are needed"
        return {}, {law.name: reason for law in laws}
    errors, reasons = {}, {}
    for law in laws:
        try:
            errors[law.name] = _errors(law, table, blocks)
        except ValueError as error:
            reasons[law.name] = f"blocks ({', '.join(keys)}) left out: {error}"
    means = {name: _block_means(np.abs(error), blocks) for name, error in errors.items()}
    if not means:
        return {}, reasons
    best = min(means, key=lambda name: float(means[name].mean()))
    found = {
        name: HeldOut(
            n_blocks=len(means[name]),
            mae=float(means[name].mean()),
            rmse=float(np.sqrt(np.mean(errors[name] ** 2))),
            worse=float(np.mean(means[name] - means[best])),
            interval=_paired(means[name] - means[best]),
        )
        for name in means
    }
    return found, reasons


def _errors(law: Candidate, table: RunTable, blocks: NDArray[np.int64]) -> FloatArray:
    """Observed − predicted loss of every run by the law refitted without the run's block. [n]."""
    kept = blocks[None, :] != np.arange(blocks.max() + 1)[:, None]
    predicted = law.refit(kept)[blocks, np.arange(len(blocks))]
    return np.asarray(table.runs["loss"].to_numpy(dtype=float) - np.exp(predicted), dtype=float)


def _block_means(values: FloatArray, blocks: NDArray[np.int64]) -> FloatArray:
    return np.asarray(np.bincount(blocks, values) / np.bincount(blocks), dtype=float)


def _paired(difference: FloatArray) -> tuple[float, float]:
    """95 % interval of the mean of differences over blocks, Student's t."""
    mean, n = float(difference.mean()), len(difference)
    half = float(student.ppf(0.975, n - 1) * difference.std(ddof=1) / np.sqrt(n))
    return mean - half, mean + half
