"""The sentence that a comparison comes down to, computed from its numbers."""

from .consequences import Consequences, Estimate
from .difference import Difference

CANNOT_TELL = "Cannot tell"
FEW_CELLS = 10  # below, percentiles over blocks are rough
_SMALL_LOSS = 5e-4  # nats; below, a change is not worth a word
_SMALL_PART = 0.25  # of a change of loss; a part whose interval stays below has no say in it


def decided(value: Difference) -> int:
    """1 or −1 when the interval of Δφ lies on one side of zero and no fit hit φ's bound, else 0."""
    if value.delta_phi_ci is None or value.n_at_bound > 0.025 * value.n_resamples:
        return 0
    low, high = value.delta_phi_ci
    return 1 if low > 0 else -1 if high < 0 else 0


def verdict(
    value: Difference,
    shared_cells: Difference | None,
    meaning: Consequences,
    *,
    identical: bool,
) -> str:
    """Say what the variant does to the worth of a recurrence, and what that means for loss and serving.

    "Cannot tell" when the interval of Δφ covers zero or is missing, when φ stopped on its bound, or
    when the (budget, r) cells that both tables hold do not give the same sign.
    """
    if identical:
        return (
            f"{CANNOT_TELL}: no difference, every run of the variant is one of the baseline's, so that "
            "Δφ says nothing of a variant."
        )
    return " ".join([_of_phi(value, shared_cells), *_of_loss(meaning), *_of_serving(meaning)])


def _of_phi(value: Difference, shared_cells: Difference | None) -> str:
    numbers = f"φ {value.phi_baseline:.3f} → {value.phi_variant:.3f}, Δφ = {value.delta_phi:+.3f}"
    if value.delta_phi_ci is None:
        return f"{CANNOT_TELL} whether a recurrence is worth more ({numbers}): {value.reason}."
    low, high = value.delta_phi_ci
    numbers += f", 95 % interval [{low:+.3f}, {high:+.3f}]"
    sign = decided(value)
    if sign == 0:
        why = (
            "the interval covers 0"
            if low <= 0 <= high
            else f"φ stopped on its bound in {value.n_at_bound} of {value.n_resamples} resamples"
        )
        return f"{CANNOT_TELL} whether a recurrence is worth more or less ({numbers}): {why}."
    if shared_cells is not None and decided(shared_cells) != sign:
        return (
            f"{CANNOT_TELL} whether a recurrence is worth more or less ({numbers}): on the (budget, r) "
            f"cells that both tables hold Δφ = {shared_cells.delta_phi:+.3f}{_interval(shared_cells)}, "
            "which does not confirm the sign."
        )
    more = "more" if sign > 0 else "less"
    return f"A recurrence is worth {more} in the variant ({numbers})."


def _interval(value: Difference) -> str:
    if value.delta_phi_ci is None:
        return f" without an interval ({value.reason})"
    return f" [{value.delta_phi_ci[0]:+.3f}, {value.delta_phi_ci[1]:+.3f}]"


def _of_loss(meaning: Consequences) -> list[str]:
    change = meaning.overall.get("loss_change")
    if change is None or change.value is None:
        return ["What it does to the loss cannot be said (no compute optimum in both tables)."]
    budget = max(effect.budget_flops for effect in meaning.effects)
    looped = [one for one in meaning.effects if one.budget_flops == budget and one.r > 1]
    rs = sorted({effect.r for effect in looped})  # those that `overall` is the mean of
    place = f"At C = {budget:.3g} FLOPs the best loss (r = {', '.join(str(r) for r in rs)})"
    if change.sign == 0:
        return [f"{place} may be higher or lower ({_nats(change)})."]
    text = f"{place} {'falls' if change.sign < 0 else 'rises'} by {_nats(change, bare=True)}"
    parts = {"capacity": meaning.overall["capacity_part"], "tokens": meaning.overall["token_part"]}
    told = ", ".join(f"{_nats(part)} from {name}" for name, part in parts.items())
    return [f"{text}: {told}{_source(change, parts)}."]


def _source(change: Estimate, parts: dict[str, Estimate]) -> str:
    """Whether the change comes from the loop or from cheaper tokens, where the intervals say so."""
    helps = {
        name: part.sign == change.sign and abs(part.value or 0.0) > _SMALL_LOSS
        for name, part in parts.items()
    }
    against = {
        name: part.sign == -change.sign and abs(part.value or 0.0) > _SMALL_LOSS
        for name, part in parts.items()
    }
    better = change.sign < 0
    if helps["tokens"] and against["capacity"]:
        return (
            "; cheaper training tokens hide a loss of capacity"
            if better
            else "; dearer training tokens outweigh a gain of capacity"
        )
    certain = [name for name in parts if helps[name]]
    if len(certain) != 1:
        return ""
    (other,) = set(parts) - set(certain)
    if not _small(parts[other], change):
        return f"; only the part from {certain[0]} is certain"
    if certain == ["tokens"]:
        return "; it comes from the tokens alone"
    return "; it is a gain of capacity" if better else "; it is a loss of capacity"


def _small(part: Estimate, change: Estimate) -> bool:
    """Whether the whole interval of a part is small beside the change."""
    if part.low is None or part.high is None or change.value is None:
        return False
    return max(abs(part.low), abs(part.high)) <= _SMALL_PART * abs(change.value)


def _nats(one: Estimate, *, bare: bool = False) -> str:
    value, low, high = (part if part is not None else float("nan") for part in vars(one).values())
    if bare:
        low, high = sorted((abs(low), abs(high)))
        return f"{abs(value):.4f} nats [{low:.4f}, {high:.4f}]"
    if one.low is None:
        return f"{value:+.4f} nats"
    return f"{value:+.4f} nats [{low:+.4f}, {high:+.4f}]"


def _of_serving(meaning: Consequences) -> list[str]:
    width = meaning.overall.get("width")
    if width is None or width.value is None:
        return []
    cost = meaning.overall["equal_loss_inference_flops"]
    at_budget = meaning.overall["inference_flops"]
    text = f"The compute-optimal width changes by {_percent(width)}"
    if at_budget.value is not None:
        text += f" and inference FLOPs per token by {_percent(at_budget)} at equal budget"
    if cost.value is not None:
        text += f", by {_percent(cost)} at equal loss"
    return [f"{text}."]


def _percent(one: Estimate) -> str:
    """Write a ratio as a change in percent with its interval, and a word where that covers no change."""
    if one.value is None:
        return "an unknown amount"
    text = f"{100 * (one.value - 1):+.1f} %"
    if one.low is None or one.high is None:
        return text
    text += f" [{100 * (one.low - 1):+.1f}, {100 * (one.high - 1):+.1f}]"
    return text if one.low > 1 or one.high < 1 else f"{text} (direction open)"
