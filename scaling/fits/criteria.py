"""Which law describes the runs better, and by how much: information criteria and held-out error.

The Huber objective f with a small δ is the negative log likelihood of Laplace errors of log loss up
to scale: f/δ ≈ Σ|ρ|. With the scale at its best value, b = f/(n·δ),
−2·log ℓ = 2n·(1 + log(2b)), so that two laws differ by 2n·log(f₁/f₂);
AIC = −2·log ℓ + 2k, AICc = AIC + 2k·(k + 1)/(n − k − 1), BIC = −2·log ℓ + k·log n,
k the free parameters and the scale (Burnham & Anderson 2002, chapter 2; Schwarz 1978). They take the
runs as independent and the errors as Laplace's; where either is wrong they are too kind to laws with
more parameters (`per_architecture` has numbers). The held-out error assumes neither: whole (budget, r)
cells, or whole budgets, are left out, the law is refitted to the others and predicts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..record import Record
from ..runs.table import RunTable
from ..solver.solve import RANDOM_STARTS
from ..text import NONE, bullets, markdown_table, wrap
from .candidates import CHINCHILLA, ZERO, candidates
from .fit import r_squared
from .heldout import HeldOut, held_out

NOISE = 2.0  # a difference in AICc or BIC below this tells nothing (Burnham & Anderson 2002)
CELL, BUDGET = "(budget, r) cell", "budget"


@dataclass(frozen=True, kw_only=True)
class LawScore(Record):
    """One law. parameters: without the scale. scale: b, of the log residuals.

    delta_aicc, delta_bic: distance to the lowest. by_cell, by_budget: None where blocks cannot be
    left out; `reason` says why.
    """

    name: str
    parameters: int
    r2: float
    rmse: float
    objective: float
    scale: float
    aic: float
    aicc: float
    bic: float
    delta_aicc: float
    delta_bic: float
    by_cell: HeldOut | None
    by_budget: HeldOut | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class LawComparison(Record):
    """All laws, lowest AICc first.

    winners: criterion → law. choice: the law with the fewest parameters that no held-out error (or,
    without one, BIC) tells from the best. unfitted: law → why these runs cannot identify it.
    """

    split: str
    loss: str
    n_runs: int
    scores: tuple[LawScore, ...]
    winners: dict[str, str]
    choice: str
    verdict: str
    caveats: tuple[str, ...]
    unfitted: dict[str, str]

    def score(self, name: str) -> LawScore:
        """Score of a law by its name (`candidates`)."""
        return next(one for one in self.scores if one.name == name)


def compare_laws(
    table: RunTable, *, delta: float = 1e-3, n_starts: int = RANDOM_STARTS
) -> LawComparison:
    """Fit every law of `candidates` to the runs and compare them.

    Raises ValueError when no law can be fitted.
    """
    if not delta > 0:
        raise ValueError(
            f"delta is {delta}, but the Huber threshold must be positive here; the paper's is 1e-3."
        )
    laws, unfitted = candidates(table, delta=delta, n_starts=n_starts)
    if not laws:
        raise ValueError(next(iter(unfitted.values())))
    by_cell, cell_reasons = held_out(laws, table, ["budget_flops", "r"])
    by_budget, budget_reasons = held_out(laws, table, ["budget_flops"])
    criteria = {
        law.name: information(law.objective, len(table), law.parameters, delta) for law in laws
    }
    lowest_aicc, lowest_bic = (min(values[k] for values in criteria.values()) for k in (1, 2))
    scores = []
    for law in laws:
        aic, aicc, bic = criteria[law.name]
        residual = table.runs["loss"].to_numpy(dtype=float) - np.exp(law.log_predicted)
        scores.append(
            LawScore(
                name=law.name,
                parameters=law.parameters,
                r2=r_squared(residual, table.runs["loss"].to_numpy(dtype=float)),
                rmse=float(np.sqrt(np.mean(residual**2))),
                objective=law.objective,
                scale=law.objective / (len(table) * delta),
                aic=aic,
                aicc=aicc,
                bic=bic,
                delta_aicc=aicc - lowest_aicc if np.isfinite(aicc) else float("inf"),
                delta_bic=bic - lowest_bic,
                by_cell=by_cell.get(law.name),
                by_budget=by_budget.get(law.name),
                reason=cell_reasons.get(law.name) or budget_reasons.get(law.name),
            )
        )
    scores.sort(key=lambda one: one.aicc)
    winners = _winners(scores)
    choice = _choice(scores)
    return LawComparison(
        split=table.split,
        loss=table.loss,
        n_runs=len(table),
        scores=tuple(scores),
        winners=winners,
        choice=choice,
        verdict=_verdict(scores, winners, choice),
        caveats=_caveats(scores, winners, choice),
        unfitted=unfitted,
    )


def information(
    objective: float, n: int, parameters: int, delta: float
) -> tuple[float, float, float]:
    """AIC, AICc and BIC from the Huber objective of n runs; AICc is infinite for n ≤ k + 1.

    >>> [round(x, 1) for x in information(2.8e-4, 116, 6, 1e-3)]
    [-991.4, -990.3, -972.1]
    """
    k = parameters + 1
    likelihood = 2 * n * (1 + float(np.log(2 * max(objective, 1e-300) / (n * delta))))
    aic = likelihood + 2 * k
    correction = 2 * k * (k + 1) / (n - k - 1) if n > k + 1 else float("inf")
    return aic, aic + correction, likelihood + k * float(np.log(n))


def _winners(scores: Sequence[LawScore]) -> dict[str, str]:
    winners = {
        "AICc": min(scores, key=lambda one: one.aicc).name,
        "BIC": min(scores, key=lambda one: one.bic).name,
    }
    for scheme in (CELL, BUDGET):
        held = {one.name: found for one in scores if (found := _of(one, scheme)) is not None}
        if held:
            winners[f"{scheme} left out"] = min(held, key=lambda name: held[name].mae)
    return winners


def _of(score: LawScore, scheme: str) -> HeldOut | None:
    return score.by_cell if scheme == CELL else score.by_budget


def _choice(scores: Sequence[LawScore]) -> str:
    """Choose the law with the fewest parameters that cannot be told from the best."""

    def close(one: LawScore) -> bool:
        held = [found for found in (one.by_cell, one.by_budget) if found is not None]
        if any(score.by_cell or score.by_budget for score in scores):
            return bool(held) and all(found.within_noise for found in held)
        return one.delta_bic < NOISE

    near = [one for one in scores if close(one)] or list(scores)
    return min(near, key=lambda one: (one.parameters, one.aicc)).name


def _verdict(scores: Sequence[LawScore], winners: dict[str, str], choice: str) -> str:
    """Say which law describes the runs, and by how much it beats each of the others."""
    if len(set(winners.values())) == 1:
        text = f"Every criterion ({', '.join(winners)}) prefers {choice}."
        if choice not in winners.values():
            text = (
                f"Every criterion prefers {next(iter(winners.values()))}, but the runs left out do "
                f"not tell it from {choice}, which has fewer parameters."
            )
    else:
        named = "; ".join(f"{criterion}: {law}" for criterion, law in winners.items())
        text = (
            f"The criteria disagree ({named}); {choice} has the fewest parameters among the laws that "
            "the runs left out do not tell from the best."
        )
    own = next(one for one in scores if one.name == choice)
    others = [_against(own, one) for one in scores if one.name != choice]
    return f"{text} Against {choice}: {'; '.join(others)}." if others else text


def _against(own: LawScore, other: LawScore) -> str:
    """One law beside the chosen one: differences in AICc, BIC and held-out error."""
    text = (
        f"{other.name}: AICc {other.aicc - own.aicc:+.1f}, BIC {other.bic - own.bic:+.1f}, RMSE "
        f"{other.rmse / own.rmse:.2f} ×"
    )
    if own.by_cell is not None and other.by_cell is not None:
        text += (
            f", held-out error {other.by_cell.mae / own.by_cell.mae:.2f} × "
            f"({other.by_cell.mae - own.by_cell.mae:+.4f} nats)"
        )
    return text


def _caveats(scores: Sequence[LawScore], winners: dict[str, str], choice: str) -> tuple[str, ...]:
    out = []
    by_name = {one.name: one for one in scores}
    best = scores[0]
    near = [one for one in scores[1:] if one.delta_aicc < NOISE]
    if near:
        names = ", ".join(one.name for one in near)
        out.append(f"AICc does not tell {names} from {best.name} (difference below {NOISE:g})")
    for scheme in (CELL, BUDGET):
        winner = winners.get(f"{scheme} left out")
        if winner is None:
            continue
        close = [
            f"{one.name} ({found.worse:+.4f} nats, interval [{found.interval[0]:+.4f}, "
            f"{found.interval[1]:+.4f}])"
            for one in scores
            if one.name != winner and (found := _of(one, scheme)) is not None and found.within_noise
        ]
        if close:
            out.append(
                f"with each {scheme} left out, the error does not tell {', '.join(close)} from "
                f"{winner}: within noise"
            )
    if best.name != choice and by_name[choice].delta_aicc >= NOISE:
        out.append(
            f"AICc and BIC take the runs as independent and their errors as Laplace's; what the runs of "
            f"a cell share counts as evidence for {best.name} there, and not in the held-out error"
        )
    same = [by_name[name].objective for name in (CHINCHILLA, ZERO) if name in by_name]
    if len(same) == 2 and abs(same[0] - same[1]) <= 1e-9 * same[0]:
        out.append(f"{CHINCHILLA} is {ZERO}: under this split N_once + N_rec is the model's own N")
    return tuple(out)


def render_comparison(found: LawComparison) -> str:
    """Write a table of the laws, the verdict and its caveats."""
    header = ["law", "parameters", "R²", "RMSE, nats", "ΔAICc", "ΔBIC"]
    header += ["error, cell left out", "worse by", "error, budget left out", "worse by"]
    rows = [
        [
            one.name,
            f"{one.parameters}",
            f"{one.r2:.4f}",
            f"{one.rmse:.4f}",
            f"{one.delta_aicc:.1f}",
            f"{one.delta_bic:.1f}",
            *_cells(one.by_cell),
            *_cells(one.by_budget),
        ]
        for one in found.scores
    ]
    notes = [f"{text}." for text in found.caveats]
    notes += [f"{name} is not fitted: {reason}" for name, reason in found.unfitted.items()]
    notes += [f"{one.name}: {one.reason}." for one in found.scores if one.reason is not None]
    return "\n\n".join(
        part for part in (markdown_table(header, rows), wrap(found.verdict), bullets(notes)) if part
    )


def _cells(held: HeldOut | None) -> list[str]:
    if held is None:
        return [NONE, NONE]
    low, high = held.interval
    return [f"{held.mae:.4f}", f"{held.worse:+.4f} [{low:+.4f}, {high:+.4f}]"]
