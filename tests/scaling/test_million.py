"""A million runs: the command works, finds the law they came from, and stays within memory."""

import json
import os
import resource
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from scaling.solver.laws import JointLaw

SEEDS = 250
LAW = JointLaw(E=1.57, A=28.0, alpha=0.199, B=916.0, beta=0.369, phi=0.46)
MOST_MEMORY = 8 * 2**30


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    """40 budgets × 4 r × 25 widths × 250 seeds under `LAW`, 1 % noise."""
    budgets, rs, widths = np.geomspace(1e17, 1e20, 40), (1, 2, 4, 8), np.arange(6, 31) * 64
    budget, r, width = (axis.ravel() for axis in np.meshgrid(budgets, rs, widths, indexing="ij"))
    layer = 12 * width**2
    n_once, n_rec = 4 * layer + 65536 * width, 16 / r * layer
    flops = 6 * (n_once + r * n_rec)
    tokens = budget / flops
    settings = pd.DataFrame(
        {
            "recurrences": r,
            "hidden_size": width,
            "budget_flops": budget,
            "train_flops_per_token": flops,
            "n_once": n_once,
            "n_rec": n_rec,
            "tokens": tokens,
            "val_loss": LAW.loss(n_once, n_rec, r, tokens),
        }
    )
    frame = settings.loc[settings.index.repeat(SEEDS)].reset_index(drop=True)
    frame["run_id"] = [f"run-{k}" for k in range(len(frame))]
    frame["seed"] = np.tile(np.arange(SEEDS), len(settings))
    frame["val_loss"] *= np.exp(0.01 * np.random.default_rng(0).standard_normal(len(frame)))
    path = tmp_path_factory.mktemp("million") / "runs.parquet"
    frame.to_parquet(path)
    return path


@pytest.mark.slow
def test_a_million_runs_give_their_law(million, tmp_path):
    """1 % noise on a million runs leaves φ within 0.005 (its interval is 0.004 wide)."""
    out = tmp_path / "fit.json"
    subprocess.run(
        [sys.executable, "-m", "scaling", "fit", str(million), "--json", str(out)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY)),
    )
    found = json.loads(out.read_text())
    assert found["n_runs"] == 1_000_000
    assert found["phi"] == pytest.approx(LAW.phi, abs=0.005)
    low, high = found["phi_ci"]
    assert low <= LAW.phi <= high and high - low < 0.02
