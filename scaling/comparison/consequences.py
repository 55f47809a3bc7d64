"""What a shift of φ means: capacity, loss at equal budget, compute-optimal width, cost of serving.

All from the two fitted laws with each architecture's exact FLOPs, and the same again under every
resample's laws, which gives the intervals. Symbols: C budget in FLOPs, F training FLOPs per token,
D tokens, d hidden size, L loss in nats per token; row 0 is the fit of all runs, the rest resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..optima.frontier import Architecture, architectures
from ..optima.optima import Laws, Optima, optima_at_budget, optima_at_loss
from ..record import Record
from ..solver.laws import FloatArray
from .inference import InferenceCosts, inference_costs
from .pairing import Pair

_ENOUGH = 0.9  # share of resamples that must have a value for an interval


@dataclass(frozen=True, kw_only=True)
class Estimate(Record):
    """A number with its 95 % percentile interval over the resamples.

    All None where it could not be computed; low, high alone None without resamples.
    """

    value: float | None
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """1 or −1 when the whole interval lies on that side of zero, otherwise 0."""
        if self.low is None or self.high is None:
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0


@dataclass(frozen=True, kw_only=True)
class Capacity(Record):
    """What one looped architecture counts for at one width under each law.

    gain: r^φ of the shared block. n: own parameters, n_eff: parameters of the unlooped model with the
    same capacity (counts). change: n_eff of the variant − n_eff of the baseline; ratio: of the same.
    """

    r: int
    effective_depth: float | None
    hidden_size: float
    gain_baseline: float
    gain_variant: float
    n_baseline: float
    n_variant: float
    n_eff_baseline: float
    n_eff_variant: float
    change: Estimate
    ratio: Estimate


@dataclass(frozen=True, kw_only=True)
class Effect(Record):
    """Variant against baseline at the compute optimum of one architecture and budget.

    loss_baseline, loss_variant: lowest predicted loss at C, nats. loss_change = capacity_part +
    token_part: the other law and architecture at unchanged FLOPs per token, and the other FLOPs per
    token (hence more or fewer tokens at C) under an unchanged law, the width chosen anew each time;
    the average of the two orders in which they can be taken. equal_tokens: change at the
    baseline's optimal width and tokens. tokens, width, inference_flops: ratios of variant to
    baseline at C (inference FLOPs per token). The last four are ratios at equal loss, for the
    compute-optimal variant that reaches loss_baseline: training FLOPs, inference FLOPs per token,
    weight bytes, bytes of keys and values. extrapolated: an optimum lies outside the table's widths.
    """

    budget_flops: float
    r: int
    effective_depth: float | None
    hidden_size_baseline: float | None
    hidden_size_variant: float | None
    loss_baseline: float | None
    loss_variant: float | None
    loss_change: Estimate
    capacity_part: Estimate
    token_part: Estimate
    equal_tokens: Estimate
    tokens: Estimate
    width: Estimate
    inference_flops: Estimate
    equal_loss_budget: Estimate
    equal_loss_inference_flops: Estimate
    equal_loss_weight_bytes: Estimate
    equal_loss_kv_bytes: Estimate
    extrapolated: bool


_DIFFERENCES = ("loss_change", "capacity_part", "token_part", "equal_tokens")
_RATIOS = (
    "tokens",
    "width",
    "inference_flops",
    "equal_loss_budget",
    "equal_loss_inference_flops",
    "equal_loss_weight_bytes",
    "equal_loss_kv_bytes",
)


@dataclass(frozen=True, kw_only=True)
class Consequences(Record):
    """Everything that follows from two fits.

    effects: per looped architecture (the unlooped one, too, where the variant has its own) and
    budget. overall: over the looped architectures at the largest shared budget, mean of differences
    and geometric mean of ratios, by the names in `Effect`. basis: how inference costs were found.
    unavailable: what could not be computed and why.
    """

    capacity: tuple[Capacity, ...]
    effects: tuple[Effect, ...]
    overall: dict[str, Estimate]
    basis: tuple[str, ...]
    unavailable: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Two:
    """The same architecture in both tables, with laws [R] and serving costs."""

    baseline: Architecture
    variant: Architecture
    laws: tuple[Laws, Laws]
    costs: tuple[InferenceCosts, InferenceCosts]


def consequences(pair: Pair, baseline: Laws, variant: Laws) -> Consequences:
    """Compute what two fits mean; row 0 of the laws is the fit of all runs, the rest are resamples."""
    both, unavailable = _matched(pair, (baseline, variant))
    rows: dict[float, list[dict[str, FloatArray]]] = {}
    effects = []
    for budget in pair.budgets:
        for two in both:
            found, optima = _values(two, budget)
            effects.append(_effect(two, budget, found, optima))
            if two.baseline.r > 1:
                rows.setdefault(budget, []).append(found)
    return Consequences(
        capacity=tuple(_capacity(two) for two in both if two.baseline.r > 1),
        effects=tuple(effects),
        overall=_overall(rows[max(rows)]) if rows else {},
        basis=_basis(both),
        unavailable=tuple(unavailable),
    )


def _matched(pair: Pair, laws: tuple[Laws, Laws]) -> tuple[list[_Two], list[str]]:
    """Architectures that both tables have as polynomials in d, and why not the others."""
    tables = (pair.baseline, pair.variant)
    found = [architectures(table.runs) for table in tables]
    unavailable = [
        f"{table.source}: no compute optimum for r = {r}: {reason}"
        for table, (_, reasons) in zip(tables, found, strict=True)
        for r, reason in reasons.items()
    ]
    named = [{(one.r, one.effective_depth): one for one in got} for got, _ in found]
    costs = [
        {(one.r, one.effective_depth): one for one in inference_costs(table.runs)}
        if "hidden_size" in table.runs
        else {}
        for table in tables
    ]
    out = []
    for key in sorted(named[0], key=lambda key: (key[0], key[1] or 0.0)):
        if key[0] == 1 and pair.n_reused:
            continue  # the same runs on both sides
        if key in named[1]:
            two = _Two(
                baseline=named[0][key],
                variant=named[1][key],
                laws=laws,
                costs=(costs[0][key], costs[1][key]),
            )
            out.append(two)
    only = [sorted({int(r) for r in table.runs["r"] if r > 1}) for table in tables]
    if only[0] != only[1]:
        unavailable.append(
            f"compared at equal r alone: the baseline has r = {_listed(only[0])}, the variant r = "
            f"{_listed(only[1])}"
        )
    return out, unavailable


def _basis(both: Sequence[_Two]) -> tuple[str, ...]:
    """How costs were found, every sentence once with the table and the r it holds for."""
    out: dict[str, list[int]] = {}
    for k, name in enumerate(("baseline", "variant")):
        for two in both:
            for text in two.costs[k].basis:
                out.setdefault(f"{name}: {text}", []).append(two.baseline.r)
    return tuple(f"{text} (r = {_listed(sorted(set(rs)))})" for text, rs in out.items())


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values) or "none"


def _capacity(two: _Two) -> Capacity:
    """N_eff at the middle (geometric mean) of the widths that both tables have."""
    one, other = two.baseline, two.variant
    low, high = max(one.smallest, other.smallest), min(one.largest, other.largest)
    width = float(np.sqrt(low * high))
    d = np.full(len(two.laws[0].E), width)
    before, after = two.laws[0].effective(one, d), two.laws[1].effective(other, d)
    return Capacity(
        r=one.r,
        effective_depth=one.effective_depth,
        hidden_size=width,
        gain_baseline=float(one.r ** two.laws[0].phi[0]),
        gain_variant=float(other.r ** two.laws[1].phi[0]),
        n_baseline=float(one.parameters(width)),
        n_variant=float(other.parameters(width)),
        n_eff_baseline=float(before[0]),
        n_eff_variant=float(after[0]),
        change=estimate(after - before),
        ratio=estimate(after / before),
    )


def _values(two: _Two, budget: float) -> tuple[dict[str, FloatArray], tuple[Optima, Optima]]:
    """Every quantity of `Effect` under all laws, [R] each, and both optima."""
    one, other = two.baseline, two.variant
    first, second = two.laws
    before = optima_at_budget(first, one, one.flops, budget)
    after = optima_at_budget(second, other, other.flops, budget)
    old_law_new_flops = optima_at_budget(first, one, other.flops, budget)
    new_law_old_flops = optima_at_budget(second, other, one.flops, budget)
    law_first = new_law_old_flops.loss - before.loss
    law_last = after.loss - old_law_new_flops.loss
    tokens_first = old_law_new_flops.loss - before.loss
    tokens_last = after.loss - new_law_old_flops.loss
    same = optima_at_loss(second, other, other.flops, before.loss)
    cost, new_cost = two.costs
    return {
        "loss_change": after.loss - before.loss,
        "capacity_part": (law_first + law_last) / 2,
        "token_part": (tokens_first + tokens_last) / 2,
        "equal_tokens": second.loss(other, before.width, before.tokens) - before.loss,
        "tokens": after.tokens / before.tokens,
        "width": after.width / before.width,
        "inference_flops": new_cost.at("flops", after.width) / cost.at("flops", before.width),
        "equal_loss_budget": same.budget / budget,
        **{
            f"equal_loss_{label}": new_cost.at(name, same.width) / cost.at(name, before.width)
            for label, name in (
                ("inference_flops", "flops"),
                ("weight_bytes", "weight_bytes"),
                ("kv_bytes", "kv_bytes"),
            )
        },
    }, (before, after)


def _effect(
    two: _Two, budget: float, found: dict[str, FloatArray], optima: tuple[Optima, Optima]
) -> Effect:
    before, after = optima
    outside = [
        not one.smallest <= at.width[0] <= one.largest
        for one, at in ((two.baseline, before), (two.variant, after))
    ]
    return Effect(
        budget_flops=budget,
        r=two.baseline.r,
        effective_depth=two.baseline.effective_depth,
        hidden_size_baseline=_number(before.width[0]),
        hidden_size_variant=_number(after.width[0]),
        loss_baseline=_number(before.loss[0]),
        loss_variant=_number(after.loss[0]),
        extrapolated=any(outside),
        **{name: estimate(values) for name, values in found.items()},
    )


def _overall(rows: list[dict[str, FloatArray]]) -> dict[str, Estimate]:
    out = {}
    for name in _DIFFERENCES:
        out[name] = estimate(np.mean([row[name] for row in rows], axis=0))
    for name in _RATIOS:
        out[name] = estimate(np.exp(np.mean([np.log(row[name]) for row in rows], axis=0)))
    return out


def estimate(values: FloatArray) -> Estimate:
    """Value of row 0 with 2.5th and 97.5th percentiles of the other rows."""
    value, drawn = float(values[0]), values[1:]
    known = drawn[np.isfinite(drawn)]
    if not np.isfinite(value):
        return Estimate(value=None, low=None, high=None)
    if len(drawn) == 0 or len(known) < _ENOUGH * len(drawn):
        return Estimate(value=value, low=None, high=None)
    low, high = np.percentile(known, [2.5, 97.5])
    return Estimate(value=value, low=float(low), high=float(high))


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
