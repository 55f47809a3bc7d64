"""Two tiny runs trained for eight steps, a fit whose φ is known, and copies of both to change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import scaling
from scaling.outputs import write_json
from scaling.reports.analysis import as_json
from scaling.runs import write_table
from scaling.solver.laws import JointLaw
from training.config import resolve
from training.loop import train

T = 32
LAW = JointLaw(E=1.6, A=30.0, alpha=0.2, B=900.0, beta=0.37, phi=0.6)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> dict[int, Path]:
    """Folders of a looped run (r = 2, four query and two key/value heads, truncated BPTT) and an unlooped one, by r."""
    root = tmp_path_factory.mktemp("trained")
    text = "\n\n".join(
        f"The shared block reads the state {i} times, and the coda reads it once."
        for i in range(900)
    )
    (root / "corpus.txt").write_text(text)
    fields = {
        "out": str(root / "runs"),
        "steps": 8,
        "batch_tokens": 4 * T,
        "precision": "fp32",
        "log_every": 3,
        "data": {
            "corpus": "text",
            "files": [str(root / "corpus.txt")],
            "vocab_size": 300,
            "sequence_length": T,
            "validation_fraction": 0.1,
        },
        "model": {
            "hidden_size": 32,
            "num_key_value_heads": 2,
            "effective_depth": 4,
            "shared_depth": 2,
            "head_dim": 8,
        },
        "transfer": {
            "reference_width": 16,
            "reference_batch_tokens": 4 * T,
            "reference_recurrences": 2,
        },
    }
    folders = {}
    for r, backprop in ((2, "half"), (1, "all")):
        model = fields["model"] | {"recurrences": r, "backprop_recurrences": backprop}
        config = resolve(fields | {"run_id": f"tiny-r{r}", "model": model})
        assert train(config)["status"] == "finished"
        folders[r] = config.folder
    return folders


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    """Copy of the looped run, alone in its folder."""
    return Path(shutil.copytree(trained[2], tmp_path / "grid" / "tiny-r2"))


@pytest.fixture
def change() -> Callable[..., None]:
    """change(file, name=value, …) replaces fields of a JSON file; None as the value removes one."""

    def rewrite(path: Path, **fields: Any) -> None:
        kept = {k: v for k, v in json.loads(path.read_text()).items() if k not in fields}
        path.write_text(json.dumps(kept | {k: v for k, v in fields.items() if v is not None}))

    return rewrite


@pytest.fixture(scope="session")
def _fitted(trained, tmp_path_factory) -> Path:
    """fit.json and runs.csv of a grid without noise, of which the looped run is one."""
    folder = tmp_path_factory.mktemp("fitted")
    own = json.loads((trained[2] / "run.json").read_text())
    rows = []
    for scale in (1, 4, 16):
        for r in (1, 2):
            for d in (64, 96, 128):
                n_once, n_rec = 48 * d**2, 192 * d**2 // r
                tokens = 1e14 * scale / (6 * (n_once + r * n_rec))
                rows.append(
                    {
                        "run_id": f"x{scale}-r{r}-d{d}",
                        "recurrences": r,
                        "budget_flops": own["budget_flops"] * scale,
                        "n_once": n_once,
                        "n_rec": n_rec,
                        "tokens": tokens,
                        "val_loss": LAW.loss(n_once, n_rec, r, tokens),
                    }
                )
    table = pd.DataFrame(rows).replace({"run_id": {"x1-r2-d96": own["run_id"]}})
    write_table(table, folder / "runs.csv")
    analysis = scaling.analyse(scaling.read_table(folder / "runs.csv"))
    write_json(folder / "fit.json", as_json(analysis))
    return folder


@pytest.fixture
def grid(_fitted, run_dir, change) -> Path:
    """Folder of the looped run with fit.json and runs.csv, where the run has the loss that the table says."""
    for name in ("fit.json", "runs.csv"):
        shutil.copy(_fitted / name, run_dir.parent)
    table = pd.read_csv(_fitted / "runs.csv").set_index("run_id")
    change(run_dir / "run.json", val_loss=float(table.loc["tiny-r2", "val_loss"]))
    return run_dir.parent
