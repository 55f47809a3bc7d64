"""Two processes take the same steps as one, DDP and FSDP2, and resume to the same bits.

This file runs as a script, once for all cases, and forks when everything is imported.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import multiprocessing

import training
from training.config import load_config, save_config
from training.loop import Interrupted, train

ROOT = Path(training.__file__).parents[1]
SHARDING = ("none", "fsdp2")


def run_all(rank, port, tasks):
    """In one of the two processes: train each recipe, asked to stop by process 1 alone after so many steps."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for recipe, steps in tasks:
        asked = []

        def stop(steps=steps, asked=asked):
            asked.append(1)
            return rank == 1 and len(asked) == steps

        try:
            train(load_config(recipe), stop_asked=stop)
        except Interrupted:
            assert steps is not None
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = str(probe.getsockname()[1])
    todo = json.loads(sys.argv[1])
    multiprocessing.start_processes(run_all, (free, todo), nprocs=2, start_method="fork")


@pytest.fixture(scope="module")
def runs(recipe, tmp_path_factory):
    """All runs of two processes, and one of one process with the same recipe."""
    folder = tmp_path_factory.mktemp("recipes")
    fields = ("steps=6", "evaluation_rows=3", "model.state_init=prelude")
    configs = {"one": recipe("one-process", *fields)}
    train(configs["one"])  # makes the data, too
    tasks = []

    def add(name, *further, stops=(None,)):
        configs[name] = recipe(name, *fields, *further)
        save_config(configs[name], folder / f"{name}.yaml")
        tasks.extend((str(folder / f"{name}.yaml"), steps) for steps in stops)

    for sharding in SHARDING:
        field = f"sharding={sharding}"
        add(f"{sharding}-straight", field)
        add(f"{sharding}-stopped", field, stops=(2, 2, None))
        add(f"{sharding}-moved", field, stops=(3,))
        add(f"{sharding}-joined", field)
        asked = iter((False, False, True))
        with pytest.raises(Interrupted):  # after three steps of one process
            train(configs[f"{sharding}-joined"], stop_asked=lambda asked=asked: next(asked))
        add(f"{sharding}-parts", field, "micro_batch_rows=1")
        noise = (field, "model.state_init=normal", "steps=3")
        add(f"{sharding}-noise", *noise)
        add(f"{sharding}-noise-stopped", *noise, stops=(2, None))
        # All rows in one batch: the second process has none, and must not wait inside a forward pass, or be waited for.
        add(f"{sharding}-idle", field, "steps=1", "evaluation_rows=1000")
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(tasks)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return configs


def record(config):
    return json.loads((config.folder / "run.json").read_text())


def log(config):
    return [json.loads(line) for line in (config.folder / "log.jsonl").read_text().splitlines()]


def weights(config):
    return load_file(config.folder / "checkpoint" / "model.safetensors")


def assert_close(config, one):
    """Gradients are summed in another order (1e-7), which Adam's division by small gradients amplifies.

    Measured: norms 1e-6 apart in the first two steps, where a factor would show, then 5 times more a step, 4e-4 in the
    sixth; losses 1e-6, weights 3e-5. One process with two micro-batches is as far from one with a single batch.
    """
    assert record(config)["val_loss"] == pytest.approx(record(one)["val_loss"], rel=1e-5)
    assert record(config)["val_tokens"] == record(one)["val_tokens"]  # no row twice or left out
    assert len(log(config)) == len(log(one)) == 6
    for a, b in zip(log(one), log(config), strict=True):
        assert a.keys() == b.keys()
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        for name in a:
            if name.startswith("gradient_norm"):
                bound = 1e-5 if a["step"] <= 2 else 1e-2
                assert b[name] == pytest.approx(a[name], rel=bound), name
        # A prepared scheduler would have advanced twice as fast.
        rates = [name for name in a if name.startswith("lr/")]
        assert rates and all(a[name] == b[name] for name in (*rates, "step", "tokens"))
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(config)[name], weight, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("sharding", SHARDING)
def test_two_processes_take_the_steps_of_one(runs, sharding):
    assert record(runs[f"{sharding}-straight"])["num_processes"] == 2
    assert_close(runs[f"{sharding}-straight"], runs["one"])


@pytest.mark.parametrize("sharding", SHARDING)
def test_micro_batches_on_two_processes_are_summed_once(runs, sharding):
    assert_close(runs[f"{sharding}-parts"], runs["one"])


@pytest.mark.parametrize("sharding", SHARDING)
@pytest.mark.parametrize("start", ["", "-noise"], ids=["prelude", "random state"])
def test_stopped_by_one_of_two_processes_a_run_resumes_bit_for_bit(runs, sharding, start):
    name = f"{sharding}{start}"
    straight = runs[name if start else f"{name}-straight"]
    stopped = runs[f"{name}-stopped"]
    assert (straight.folder / "log.jsonl").read_bytes() == (
        stopped.folder / "log.jsonl"
    ).read_bytes()
    assert record(straight)["val_loss"] == record(stopped)["val_loss"]
    for name, weight in weights(straight).items():
        assert torch.equal(weights(stopped)[name], weight), name


@pytest.mark.parametrize("sharding", SHARDING)
def test_a_state_of_two_processes_is_taken_on_by_one(runs, sharding):
    moved = runs[f"{sharding}-moved"]
    assert len(log(moved)) == 3 and record(moved)["status"] == "running"
    train(moved)
    assert_close(moved, runs["one"])


@pytest.mark.parametrize("sharding", SHARDING)
def test_a_state_of_one_process_is_taken_on_by_two(runs, sharding):
    joined = runs[f"{sharding}-joined"]
    assert record(joined)["num_processes"] == 2
    assert_close(joined, runs["one"])


@pytest.mark.parametrize("sharding", SHARDING)
def test_a_process_without_validation_rows_does_not_hold_up_the_other(runs, sharding):
    idle = record(runs[f"{sharding}-idle"])
    assert idle["status"] == "finished"
    assert idle["val_tokens"] == record(runs["one"])["val_tokens"]


@pytest.mark.parametrize("sharding", SHARDING)
def test_the_checkpoint_is_that_of_a_plain_model(runs, sharding):
    """fully_shard renames the class of a model; a config that names it would load nowhere."""
    folder = runs[f"{sharding}-straight"].folder / "checkpoint"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LoopedForCausalLM"]
    assert "# Samples" in (folder.parent / "samples.md").read_text()


def test_torchrun_starts_two_processes_of_which_one_speaks(recipe, tmp_path):
    """Each by itself would be two runs in one folder."""
    config = recipe("torchrun", "steps=2")
    save_config(config, tmp_path / "recipe.yaml")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "training", "--config", str(tmp_path / "recipe.yaml")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torchrun: validation loss") == 1
    assert record(config)["num_processes"] == 2
