"""Two processes take the same steps as one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import training
from training.config import save_config
from training.loop import train


def run_on_two_processes(config, folder):
    save_config(config, folder / "recipe.yaml")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.run(
        [sys.executable, *launch, "-m", "training", "--config", str(folder / "recipe.yaml")],
        cwd=Path(training.__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_process_without_validation_rows_does_not_hold_up_the_other(recipe, tmp_path):
    """All rows in one batch: the second process has none, and must not wait inside a forward pass."""
    config = recipe("idle-process", "steps=1", "evaluation_rows=1000")
    done = run_on_two_processes(config, tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((config.folder / "run.json").read_text())
    assert record["status"] == "finished" and record["num_processes"] == 2
    assert record["val_tokens"] == train(recipe("alone", "steps=1"))["val_tokens"]


def test_torchrun_with_two_processes_takes_the_steps_of_one(recipe, tmp_path):
    """Gradients are summed in another order (1e-7), which Adam's division by small gradients
    amplifies in 6 steps (weights measured 3e-5 apart, losses 2e-7).
    """
    fields = ("steps=6", "evaluation_rows=3")
    one, two = recipe("one-process", *fields), recipe("two-processes", *fields)
    record = train(one)
    done = run_on_two_processes(two, tmp_path)
    assert done.returncode == 0, done.stderr
    spoken = done.stdout.count("two-processes: validation loss")
    assert spoken == 1  # by the main process alone; each by itself would be two runs in one folder
    other = json.loads((two.folder / "run.json").read_text())
    assert (record["num_processes"], other["num_processes"]) == (1, 2)
    assert (other["tokens"], other["steps"]) == (record["tokens"], record["steps"])
    assert other["val_tokens"] == record["val_tokens"]  # no validation row twice or left out
    assert other["val_loss"] == pytest.approx(record["val_loss"], rel=1e-5)
    logs = [
        [json.loads(line) for line in (config.folder / "log.jsonl").read_text().splitlines()]
        for config in (one, two)
    ]
    assert len(logs[0]) == len(logs[1]) == 6
    for a, b in zip(*logs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=1e-5)
        rates = [name for name in a if name.startswith("lr/")]
        # A prepared scheduler would have advanced twice as fast.
        assert rates and all(a[name] == b[name] for name in (*rates, "step", "tokens"))
    weights = [load_file(c.folder / "checkpoint" / "model.safetensors") for c in (one, two)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=3e-4)
