"""Numbers of a task from those of its documents, as lm-eval aggregations.

Every document brings its nats and a count (`Part`); a loss is the sum of nats over the sum of counts.
"""

import math
from collections.abc import Sequence

from lm_eval.api.registry import register_aggregation, register_metric

Part = tuple[float, float]  # nats, and how many tokens or bytes they are for


@register_aggregation("nll_per_token")
def nll_per_token(parts: Sequence[Part]) -> float:
    """Σ nats of gold continuations / Σ gold tokens."""
    return math.fsum(nats for nats, _ in parts) / math.fsum(count for _, count in parts)


@register_aggregation("nll_per_token_stderr")
def nll_per_token_stderr(parts: Sequence[Part]) -> float:
    """Estimate the standard error of a ratio of sums over documents, to first order; NaN for one.

    sqrt(m/(m − 1)·Σ (nats − R·count)²) / Σ count, R the ratio, m documents.
    """
    many = len(parts)
    if many < 2:
        return math.nan
    ratio = nll_per_token(parts)
    spread = math.fsum((nats - ratio * count) ** 2 for nats, count in parts)
    return math.sqrt(spread * many / (many - 1)) / math.fsum(count for _, count in parts)


@register_aggregation("looped_bits_per_byte")
def bits_per_byte(parts: Sequence[Part]) -> float:
    """Σ nats of gold continuations / (log 2 · Σ their bytes in UTF-8)."""
    return nll_per_token(parts) / math.log(2)


@register_aggregation("total")
def total(values: Sequence[float]) -> float:
    """Sum over documents."""
    return math.fsum(values)


def _as_it_is(values: Sequence[Part]) -> Sequence[Part]:
    return values


for _name, _aggregation in {
    "nll_per_token": "nll_per_token",
    "nll_per_token_stderr": "nll_per_token_stderr",
    "tokens": "total",
    "truncated": "total",
    "merged": "total",
}.items():  # lm-eval asks the network for a name that it doesn't know
    register_metric(
        metric=_name,
        higher_is_better=False,
        output_type=["loglikelihood", "multiple_choice"],
        aggregation=_aggregation,
    )(_as_it_is)
