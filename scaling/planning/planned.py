"""Forecast of a grid of runs, and the cheapest grids that would tell as much about φ.

Symbols: φ recurrence-equivalence exponent, Δφ its difference between two variants of the loop, C training
FLOPs of a run. Source of the law: Schwethelm et al. 2026 (arXiv:2604.21106), eq. 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..optima.frontier import Architecture
from ..record import Record
from ..solver.laws import JointLaw
from .cheapest import COSTS, Choice, candidates, cheapest, cost
from .design import Grid, planned_runs, with_halfway_budgets
from .forecast import Forecast, simulate
from .noise import Noise

_MOST_BUDGETS = 8  # beyond, no halfway budgets are added to what is searched


@dataclass(frozen=True, kw_only=True, eq=False)
class Guess:
    """What a forecast assumes: law, noise, the architectures' counts, a grid, and whence."""

    law: JointLaw
    noise: Noise
    family: tuple[Architecture, ...]
    grid: Grid
    source: str


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Forecast of a grid, and the cheapest grids that reach the wanted widths.

    n_runs, flops: of all runs to train, for Δφ both sweeps with the r = 1 runs once.
    """

    source: str
    law: JointLaw
    noise: Noise
    delta_phi: float | None
    grid: Grid
    n_runs: int
    flops: float
    forecast: Forecast
    choices: tuple[Choice, ...]


def plan(
    guess: Guess,
    *,
    delta_phi: float | None = None,
    targets: Sequence[float] | None = None,
    minimise: Sequence[str] = COSTS,
    n_sets: int = 200,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Forecast the interval of φ, or of Δφ, and search for the cheapest grids of given widths.

    targets: widths of the 95 % interval; by default that of the grid itself and twice it. The search
    is over parts of the grid, with budgets halfway between its own added. Raises ValueError for
    numbers that make no plan.
    """
    runs = planned_runs(guess.grid, guess.family)
    n_runs, flops = cost(guess.grid, delta_phi)
    say(f"simulating the grid: {n_runs} runs, {flops:.3g} FLOPs")
    forecast = simulate(runs, guess.law, guess.noise, delta_phi=delta_phi, n_sets=n_sets, seed=seed)
    few = len(guess.grid.budgets) <= _MOST_BUDGETS
    space = with_halfway_budgets(guess.grid) if few else guess.grid
    among = candidates(space, guess.family, guess.law, guess.noise, delta_phi=delta_phi)
    wanted = (forecast.width, 2 * forecast.width) if targets is None else tuple(targets)
    known: dict[int, Forecast] = {}
    choices = []
    for target in wanted:
        for which in minimise:
            say(f"searching {len(among.grids)} grids: interval of {target:.3f}, fewest {which}")
            choices.append(
                cheapest(
                    among, target, minimise=which, n_sets=n_sets, seed=seed, known=known, say=say
                )
            )
    return Plan(
        source=guess.source,
        law=guess.law,
        noise=guess.noise,
        delta_phi=delta_phi,
        grid=guess.grid,
        n_runs=n_runs,
        flops=flops,
        forecast=forecast,
        choices=tuple(choices),
    )
