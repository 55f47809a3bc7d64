"""How many recurrences each training step runs, where a recipe draws them, and what that costs.

A step's draw is a function of the recipe's seed and the step's number alone, the same in every process, so that a run
that was killed goes on with the draws of one that was not, and its FLOPs are known before it starts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hf_looped import LoopedConfig
from hf_looped.accounting import train_flops_per_token

from .config import TrainingConfig

NODES = 64  # of the quadrature over the log-normal rate
TAIL = 1e-12  # probability of the draws that expectations leave out


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Recurrences of one step (None: the architecture's) and of the shorter pass beside it (None: there is none)."""

    recurrences: int | None = None
    shortcut: int | None = None

    def arguments(self) -> dict[str, int]:
        """Return the model's arguments for this step."""
        names = {"num_recurrences": self.recurrences, "shortcut_recurrences": self.shortcut}
        return {name: value for name, value in names.items() if value is not None}


def trajectory(config: TrainingConfig, architecture: LoopedConfig, step: int) -> Trajectory:
    """Draw the recurrences of a step, if the recipe draws any.

    With `model.sample_recurrences` r is 1 + Poisson(exp(N(log(r̄ − 1) − σ²/2, σ²))), whose mean is the recipe's r̄ (the
    Poisson-log-normal of Geiping et al. 2025, arXiv:2502.05171, section 3.3, moved to keep that mean). A model with
    time conditioning gets a second, shorter pass of 1 … r − 1 recurrences, each as likely (LoopFormer,
    arXiv:2602.11451).
    """
    rng = np.random.default_rng((config.seed, step))
    if config.model.samples:
        mean, sigma = config.model.recurrences - 1, config.model.sampling_sigma
        rate = mean * np.exp(rng.normal(-(sigma**2) / 2, sigma))
        return Trajectory(recurrences=1 + int(rng.poisson(rate)))
    if _takes_shortcuts(architecture):
        return Trajectory(shortcut=int(rng.integers(1, architecture.num_recurrences)))
    return Trajectory()


def expected_flops_per_token(config: TrainingConfig, architecture: LoopedConfig) -> int:
    """Training FLOPs per token, in expectation over the draws of a step."""
    length = config.data.sequence_length
    if config.model.samples:
        draws = probabilities(config.model.recurrences, config.model.sampling_sigma)
        costs = [(p, train_flops_per_token(architecture, length, r)) for r, p in draws]
    elif _takes_shortcuts(architecture):
        r = architecture.num_recurrences
        shares = [(1 / (r - 1), s) for s in range(1, r)]
        costs = [
            (p, train_flops_per_token(architecture, length, shortcut_recurrences=s))
            for p, s in shares
        ]
    else:
        return train_flops_per_token(architecture, length)
    return round(sum(p * cost for p, cost in costs) / sum(p for p, _ in costs))


def flops_as_run(config: TrainingConfig, architecture: LoopedConfig, steps: int) -> int:
    """Training FLOPs of all steps with the recurrences that they draw."""
    length = config.data.sequence_length
    draws = [trajectory(config, architecture, step) for step in range(steps)]
    costs = {
        draw: train_flops_per_token(architecture, length, draw.recurrences, draw.shortcut or 0)
        for draw in set(draws)
    }
    return config.batch_tokens * sum(costs[draw] for draw in draws)


def probabilities(mean: int, sigma: float) -> Iterator[tuple[int, float]]:
    """Recurrences and their probabilities, up to a negligible tail, for a mean above 1.

    The log-normal rate is integrated by Gauss–Hermite quadrature.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    weights = weights / weights.sum()
    rate = (mean - 1) * np.exp(sigma * nodes - sigma**2 / 2)
    term, left, r = np.exp(-rate), 1.0, 1
    while left > TAIL and r < 1000 * mean:
        p = float(weights @ term)
        yield r, p
        left -= p
        term = term * rate / r
        r += 1


def _takes_shortcuts(architecture: LoopedConfig) -> bool:
    return (
        architecture.time_conditioning
        and architecture.shortcut_weight > 0
        and architecture.num_recurrences > 1
    )
