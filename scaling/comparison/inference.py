"""What a model costs to serve, as a function of its width: FLOPs, weights and cached keys and values.

For one architecture these are polynomials in the hidden size d (d and d²), read off the table's own
columns. Symbols: T tokens of context, V vocabulary, L executed layers. Source: Schwethelm et al. 2026
(arXiv:2604.21106), appendix D.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..optima.frontier import polynomial
from ..record import Record
from ..runs.kinds import by_architecture
from ..solver.laws import FloatArray

_BF16 = 2  # bytes
_TOLERANCE = 1e-3  # largest relative error of a polynomial at the table's own widths

Coefficients = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class InferenceCosts(Record):
    """Costs of one architecture: coefficients of (d, d²), None where the table does not tell.

    flops: forward FLOPs per token. weight_bytes: all weights. kv_bytes: cached keys and values per
    token of context. basis: what was derived instead of read, and what is missing, as sentences.
    """

    r: int
    effective_depth: float | None
    flops: Coefficients | None
    weight_bytes: Coefficients | None
    kv_bytes: Coefficients | None
    basis: tuple[str, ...]

    def at(self, name: str, width: FloatArray | float) -> FloatArray:
        """One of the costs at width d, NaN where it is not known."""
        coefficients: Coefficients | None = getattr(self, name)
        if coefficients is None:
            return np.full(np.shape(width), np.nan)
        return polynomial(coefficients, width)


def inference_costs(
    runs: pd.DataFrame, *, context: int | None = None
) -> tuple[InferenceCosts, ...]:
    """Costs of every architecture of a table with hidden_size.

    FLOPs come from forward_flops_per_token, otherwise they are a third of the training FLOPs where
    every recurrence is trained through; bytes from weight_bytes and kv_bytes_per_token, otherwise
    from the shapes, in bfloat16. FLOPs hold at the table's sequence length or, at another
    `context` (tokens), with 4·T·d more per executed layer.
    """
    return tuple(_costs(r, depth, group, context) for r, depth, group in by_architecture(runs))


def _costs(r: int, depth: float | None, group: pd.DataFrame, context: int | None) -> InferenceCosts:
    basis: list[str] = []
    found: dict[str, Coefficients | None] = {}
    for name, derive in (("flops", _flops), ("weight_bytes", _weights), ("kv_bytes", _cache)):
        values, how = derive(group)
        if name == "flops" and isinstance(values, pd.Series) and context is not None:
            values, more = _at_context(values, group, context)
            how = "; ".join(part for part in (how, more) if part)
        found[name] = None
        if isinstance(values, pd.Series):
            found[name] = exact_polynomial(group["hidden_size"], values)
            how = how if found[name] else f"{name} is no polynomial in the width"
        if how:
            basis.append(how)
    return InferenceCosts(r=r, effective_depth=depth, basis=tuple(basis), **found)


def exact_polynomial(width: "pd.Series[float]", values: "pd.Series[float]") -> Coefficients | None:
    """(c1, c2) of c1·d + c2·d² through the values, or None where they lie off it.

    A single width tells nothing of the form and gives None, too.
    """
    d, y = width.to_numpy(dtype=float), values.to_numpy(dtype=float)
    if len(np.unique(d)) < 2:
        return None
    unit = d / d.max()
    basis = np.stack([unit, unit**2], axis=1) / y[:, None]
    solution = np.linalg.lstsq(basis, np.ones_like(y), rcond=None)[0]
    if np.max(np.abs(basis @ solution - 1)) > _TOLERANCE:
        return None
    return float(solution[0] / d.max()), float(solution[1] / d.max() ** 2)


Derived = tuple["pd.Series[float] | None", str]


def _flops(group: pd.DataFrame) -> Derived:
    if _known(group, "forward_flops_per_token"):
        return group["forward_flops_per_token"].astype(float), ""
    if not _known(group, "train_flops_per_token"):
        return (
            None,
            "inference FLOPs unknown (no forward_flops_per_token, no train_flops_per_token)",
        )
    if _known(group, "backprop_recurrences"):
        if (group["backprop_recurrences"].astype(float) < group["r"]).any():
            return None, (
                "inference FLOPs unknown: backpropagation is truncated, so that they are no third of "
                "the training FLOPs (add forward_flops_per_token)"
            )
        how = "inference FLOPs are a third of the training FLOPs"
    else:
        how = "inference FLOPs are taken as a third of the training FLOPs (full backpropagation)"
    return group["train_flops_per_token"].astype(float) / 3, how


def _at_context(flops: "pd.Series[float]", group: pd.DataFrame, context: int) -> Derived:
    """Add the attention of a longer context, 4·d FLOPs per token, layer and position."""
    if not _known(group, "sequence_length", "effective_depth"):
        return None, f"inference FLOPs at {context} tokens need sequence_length and effective_depth"
    more = context - group["sequence_length"].astype(float)
    layers = group["effective_depth"].astype(float)
    return flops + 4 * more * group["hidden_size"].astype(float) * layers, ""


def _weights(group: pd.DataFrame) -> Derived:
    if _known(group, "weight_bytes"):
        return group["weight_bytes"].astype(float), ""
    if _known(group, "n_embedding"):
        embedding = group["n_embedding"].astype(float)
        return (group["n"] + embedding) * _BF16, "weights in bfloat16, norms' gains left out"
    if _known(group, "vocab_size"):
        embedding = 2 * group["vocab_size"].astype(float) * group["hidden_size"].astype(float)
        how = "weights in bfloat16, embedding and LM head taken as untied, norms' gains left out"
        return (group["n"] + embedding) * _BF16, how
    return None, "weight memory unknown (no weight_bytes, n_embedding or vocab_size)"


def _cache(group: pd.DataFrame) -> Derived:
    if _known(group, "kv_bytes_per_token"):
        return group["kv_bytes_per_token"].astype(float), ""
    if not _known(group, "effective_depth"):
        return None, "cache memory unknown (no kv_bytes_per_token, no effective_depth)"
    values = 2 * group["effective_depth"].astype(float) * group["hidden_size"].astype(float)
    how = "keys and values in bfloat16 of every executed layer, all heads"
    return values * _BF16, how


def _known(group: pd.DataFrame, *names: str) -> bool:
    return all(name in group and bool(group[name].notna().all()) for name in names)
