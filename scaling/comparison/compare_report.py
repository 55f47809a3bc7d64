"""The text report of a comparison: Δφ and what it means. Markdown tables."""

from ..text import NONE, bullets, count, criterion, markdown_table, wrap
from .compare import Comparison
from .consequences import Effect, Estimate
from .difference import Difference


def render(comparison: Comparison) -> str:
    """Write the whole comparison as text."""
    parts = [
        _headline(comparison),
        _fits(comparison),
        _observed(comparison),
        _capacity(comparison),
        _loss(comparison),
        _serving(comparison),
        _notes(comparison),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def delta_line(value: Difference) -> str:
    """One line: Δφ with interval and probability of its sign."""
    text = f"Δφ = {value.delta_phi:+.4f}"
    if value.delta_phi_ci is None or value.p_positive is None:
        return f"{text}, interval unavailable: {value.reason}"
    low, high = value.delta_phi_ci
    return (
        f"{text}, 95 % interval [{low:+.3f}, {high:+.3f}], Δφ > 0 in {value.p_positive:.1%} of "
        f"{value.n_resamples} resamples"
    )


def _headline(one: Comparison) -> str:
    budgets = ", ".join(f"{budget:.3g}" for budget in one.budgets)
    return "\n".join(
        [
            "# Shift of the recurrence-equivalence exponent",
            "",
            delta_line(one),
            "",
            wrap(one.verdict),
            "",
            f"Baseline: {one.source_baseline}, {one.n_runs_baseline} runs, r = {_r(one.r_baseline)}",
            f"Variant:  {one.source_variant}, {one.n_runs_variant} runs, r = {_r(one.r_variant)}",
            f"Budgets:  C = {budgets} FLOPs, split {one.split}, column {one.loss}",
            f"Fits:     {criterion(one.delta)}",
            wrap(f"Draws:    {one.pairing}", indent="          "),
        ]
    )


def _r(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


def _fits(one: Comparison) -> str:
    rows = [
        [
            name,
            f"{law.phi:.4f}",
            NONE if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]",
            f"{law.alpha:.4f}",
            f"{law.beta:.4f}",
            f"{law.E:.4f}",
            f"{r2:.4f}",
        ]
        for name, law, interval, r2 in (
            ("baseline", one.law_baseline, one.phi_baseline_ci, one.r2_baseline),
            ("variant", one.law_variant, one.phi_variant_ci, one.r2_variant),
        )
    ]
    text = "## Fits on the shared budgets\n\n"
    text += markdown_table(["table", "φ", "95 % interval", "α", "β", "E", "R²"], rows)
    if one.shared_cells is not None:
        text += "\n\n" + wrap(
            f"On the (budget, r) cells that both tables hold: φ {one.shared_cells.phi_baseline:.4f} → "
            f"{one.shared_cells.phi_variant:.4f}, {delta_line(one.shared_cells)}."
        )
    return text


def _observed(one: Comparison) -> str:
    if not one.observed:
        return ""
    rows = [
        [
            f"{row.r}",
            f"{row.n_settings}",
            f"{row.n_lower}",
            f"{row.loss_change:+.4f}",
            f"{row.tokens_ratio:.3f}",
        ]
        for row in one.observed
    ]
    header = ["r", "settings", "variant lower", "mean change of loss, nats", "median tokens ratio"]
    return "## Runs at equal budget, r and width (no law)\n\n" + markdown_table(header, rows)


def _capacity(one: Comparison) -> str:
    if not one.meaning.capacity:
        return ""
    rows = [
        [
            f"{row.r}",
            _count_or_dash(row.effective_depth),
            f"{row.hidden_size:.0f}",
            f"{row.gain_baseline:.3f} → {row.gain_variant:.3f}",
            f"{count(row.n_baseline)} → {count(row.n_variant)}",
            f"{count(row.n_eff_baseline)} → {count(row.n_eff_variant)}",
            _spelled(row.ratio, ".3f"),
        ]
        for row in one.meaning.capacity
    ]
    header = ["r", "depth", "width", "block counts as", "own parameters", "N_eff", "N_eff ratio"]
    return "## Capacity: parameters of the unlooped equal\n\n" + markdown_table(header, rows)


def _loss(one: Comparison) -> str:
    rows = [
        [
            f"{effect.budget_flops:.3g}",
            f"{effect.r}",
            _fixed(effect.loss_baseline, ".4f"),
            _fixed(effect.loss_variant, ".4f"),
            _spelled(effect.loss_change, "+.4f"),
            _spelled(effect.capacity_part, "+.4f"),
            _spelled(effect.token_part, "+.4f"),
            _spelled(effect.equal_tokens, "+.4f"),
        ]
        for effect in one.meaning.effects
    ]
    if not rows:
        return ""
    header = [
        "C, FLOPs",
        "r",
        "baseline",
        "variant",
        "change",
        "of it capacity",
        "of it tokens",
        "at equal tokens",
    ]
    return "## Best loss at equal budget (nats, from the laws)\n\n" + markdown_table(header, rows)


def _serving(one: Comparison) -> str:
    if not one.meaning.effects:
        return ""
    rows = [_serving_row(effect) for effect in one.meaning.effects]
    header = [
        "C, FLOPs",
        "r",
        "width",
        "tokens",
        "inference FLOPs",
        "training FLOPs at equal loss",
        "inference FLOPs",
        "weights",
        "KV cache",
        "note",
    ]
    text = "## Compute optimum and cost of serving (ratios, variant to baseline)\n\n"
    text += markdown_table(header, rows)
    text += "\n\nWidth, tokens and the first inference FLOPs at equal budget, the next four at equal loss."
    if one.meaning.basis:
        text += "\n\n" + bullets(one.meaning.basis)
    return text


def _serving_row(effect: Effect) -> list[str]:
    return [
        f"{effect.budget_flops:.3g}",
        f"{effect.r}",
        _spelled(effect.width, ".3f"),
        _spelled(effect.tokens, ".3f"),
        _spelled(effect.inference_flops, ".3f"),
        _spelled(effect.equal_loss_budget, ".3f"),
        _spelled(effect.equal_loss_inference_flops, ".3f"),
        _spelled(effect.equal_loss_weight_bytes, ".3f"),
        _spelled(effect.equal_loss_kv_bytes, ".3f"),
        "outside the table's widths" if effect.extrapolated else "",
    ]


def _spelled(one: Estimate, form: str) -> str:
    if one.value is None:
        return NONE
    text = f"{one.value:{form}}"
    if one.low is None or one.high is None:
        return text
    return f"{text} [{one.low:{form}}, {one.high:{form}}]"


def _fixed(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def _count_or_dash(value: float | None) -> str:
    return NONE if value is None else f"{value:g}"


def _notes(one: Comparison) -> str:
    lines = [*one.notes, *one.meaning.unavailable]
    if not lines:
        return ""
    return "## Notes\n\n" + bullets([f"{line}." for line in lines])
