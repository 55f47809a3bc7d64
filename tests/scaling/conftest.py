"""The paper's runs, synthetic grids with a known law, and one analysis that many tests read."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import scaling
from scaling.solver.laws import JointLaw

PAPER = Path(__file__).parents[1] / "fixtures" / "paper_runs_baseline.csv"


@pytest.fixture(scope="session")
def paper_path():
    return PAPER


@pytest.fixture(scope="session")
def _paper():
    return scaling.read_table(PAPER)


@pytest.fixture
def paper(_paper):
    return _paper.copy()


@pytest.fixture(scope="session")
def paper_analysis(_paper):
    return scaling.analyse(scaling.RunTable.of(_paper, split="regression"))


@pytest.fixture(scope="session")
def known_law():
    return JointLaw(E=1.6, A=30.0, alpha=0.2, B=900.0, beta=0.37, phi=0.6)


@pytest.fixture(scope="session")
def make_grid():
    """Synthetic iso-depth grid: all counts exactly ∝ d², losses from a law plus noise."""

    def build(
        law, budgets=(1e14, 4e14, 1.6e15), widths=(64, 96, 128), rs=(1, 2, 4), seeds=1, noise=0.0
    ):
        generator = np.random.default_rng(7)
        rows = []
        for budget in budgets:
            for r in rs:
                for d in widths:
                    for seed in range(seeds):
                        n_once, n_rec = 48 * d**2, 192 * d**2 // r
                        flops = 6 * (n_once + r * n_rec)
                        tokens = budget / flops
                        loss = law.loss(n_once, n_rec, r, tokens) + noise * generator.normal()
                        rows.append(
                            {
                                "run_id": f"C{budget:g}-r{r}-d{d}-seed{seed}",
                                "seed": seed,
                                "recurrences": r,
                                "shared_depth": 16,
                                "hidden_size": d,
                                "budget_flops": budget,
                                "train_flops_per_token": flops,
                                "n_once": n_once,
                                "n_rec": n_rec,
                                "n_injection": 0,
                                "tokens": tokens,
                                "val_loss": loss,
                            }
                        )
        return pd.DataFrame(rows)

    return build


@pytest.fixture(scope="session")
def unwrapped():
    """Join the lines of a report's paragraphs."""
    return lambda text: " ".join(text.split())
