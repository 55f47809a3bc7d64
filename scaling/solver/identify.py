"""Which designs cannot identify the joint law's parameters: refused with the missing thing named.

Symbols: N = N_once + N_rec parameters, r recurrences, D tokens. Arrays run over runs, [n].
"""

import numpy as np

from .laws import FloatArray
from .objective import Design, residuals

_ONE_BUDGET = 0.01  # of log C: tokens are rounded to steps


def refuse_unidentifiable(design: Design, phi: float | None, where: str = "the run table") -> None:
    """Raise ValueError when no losses at these (N, r, D) could determine the parameters.

    φ is free when `phi` is None. E + A·N^−α alone needs three different N, B·D^−β three
    different D, φ two different r, and all of them together as many different runs as there are
    parameters. D must not be one multiple of N throughout: then the two terms cannot be told
    apart. Nor must all runs share one compute budget: then D follows from the width.
    """
    parameters = 6 if phi is None else 5
    if len(_distinct(design.log_loss)) < 2:
        raise ValueError(
            f"{where}: every run has the same loss, {np.exp(design.log_loss[0]):.6g} nats, so that "
            "nothing depends on N, r or D. Check the loss column."
        )
    r = _distinct(design.log_r)
    if phi is None and len(r) < 2:
        found = ", ".join(f"{value:g}" for value in np.round(np.exp(r), 9))
        raise ValueError(
            f"{where}: all runs have recurrences = {found}, but φ says how runs of different r "
            "compare and needs at least "
            "two different r. Add runs at another r, for example r = 1 with the same executed "
            "layers."
        )
    log_n = np.log(design.once + design.rec)
    points = np.unique(np.round(np.stack([log_n, design.log_r, design.log_d]), 9), axis=1).shape[1]
    if points < parameters:
        raise ValueError(
            f"{where}: {points} different runs (N, r, tokens), but the law has {parameters} free "
            "parameters and needs at "
            f"least as many. Add runs at other widths, budgets or r."
        )
    for name, values, terms in (
        ("parameter counts (n_once + n_rec)", log_n, "E, A and α"),
        ("token counts", design.log_d, "E, B and β"),
    ):
        distinct = _distinct(values)
        if len(distinct) < 3:
            raise ValueError(
                f"{where}: only {len(distinct)} different {name}, but {terms} need at least 3. "
                "Add runs at other widths or budgets."
            )
    if len(_distinct(design.log_d - log_n)) < 2:
        raise ValueError(
            f"{where}: every run has the same tokens per parameter (D/N), so that the terms A·N^−α "
            "and B·D^−β cannot be "
            "told apart. Add runs with more or fewer tokens at the same width."
        )
    if np.ptp(design.log_c) < _ONE_BUDGET:
        raise ValueError(
            f"{where}: all runs share one compute budget, {np.exp(design.log_c.mean()):.3g} FLOPs, on which the "
            "tokens follow from the width: β, and with it E and φ, would rest on the law's form alone. "
            "Add runs at a second budget."
        )
    if _rank(design, phi) < parameters:
        raise ValueError(
            f"{where}: the runs' (N, r, D) leave a combination of the law's {parameters} "
            "parameters undetermined. "
            "Cross the widths with at least two budgets and two r."
        )


def _distinct(values: FloatArray) -> FloatArray:
    return np.unique(np.round(values, 9))


def _rank(design: Design, phi: float | None) -> int:
    """Rank of the predictions' derivatives at typical parameters, columns scaled to length 1."""
    e = float(np.mean(design.log_loss)) - 0.7
    theta = np.array([e - 0.7, e - 0.7, e, 0.3, 0.35, 0.5 if phi is None else phi])
    _, jacobian = residuals(design, theta)
    free = jacobian[:, : 6 if phi is None else 5]
    lengths = np.linalg.norm(free, axis=0)
    if np.any(lengths == 0):
        return int(np.sum(lengths > 0))
    return int(np.linalg.matrix_rank(free / lengths, tol=1e-7))
