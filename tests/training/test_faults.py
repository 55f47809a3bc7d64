"""Faults put in on purpose: killed at random moments, full disks, damaged data, trackers that raise. Nothing is lost.

Further ones stand where their part is tested: damaged states (test_checkpoint), packed data (test_data), sweeps and
their workers (test_sweep, test_workers), gradients and too little text (test_loop). This file runs as a script that
imports everything once and forks a process, or two, for every try.
"""

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import accelerate.tracking
import pytest
import torch
from safetensors.torch import load_file

import training
from training import loop
from training.command import main
from training.config import load_config, save_config
from training.data import open_packed
from training.loop import train

ROOT = Path(training.__file__).parents[1]


def start(recipe, world):
    """Fork `world` processes that train a recipe together; return their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            if world > 1:
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            train(load_config(recipe))
            os._exit(0)
        children.append(child)
    return children


def torture(recipe, world, kills, seconds):
    """Kill a run `kills` times, each after a random part of `seconds`, then let it end.

    Of several processes each is killed once alone before; the others then end by themselves.
    """
    moments = random.Random(0)
    for victim in range(world) if world > 1 else ():
        children = start(recipe, world)
        time.sleep(moments.uniform(0, seconds))
        os.kill(children[victim], signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
    for _ in range(kills):
        children = start(recipe, world)
        time.sleep(moments.uniform(0, seconds))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in start(recipe, world)]


if __name__ == "__main__":
    straight, killed, world, kills = sys.argv[1:]
    torch.set_num_threads(1)
    begun = time.perf_counter()
    for child in start(straight, int(world)):
        os.waitpid(child, 0)
    seconds = time.perf_counter() - begun
    assert torture(killed, int(world), int(kills), seconds) == [0] * int(world)


def run_tortured(recipe, folder, world, kills, *fields):
    """Run a recipe once undisturbed and once killed again and again; return both."""
    configs = [recipe(f"{name}-{world}", *fields) for name in ("undisturbed", "tortured")]
    for config in configs:
        save_config(config, folder / f"{config.name}.yaml")
    done = subprocess.run(
        [
            sys.executable,
            __file__,
            *(str(folder / f"{config.name}.yaml") for config in configs),
            str(world),
            str(kills),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return configs


def assert_same_end(one, other):
    for name in ("log.jsonl", "samples.md"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    a, b = (load_file(c.folder / "checkpoint" / "model.safetensors") for c in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    records = [json.loads((c.folder / "run.json").read_text()) for c in (one, other)]
    assert records[0]["val_loss"] == records[1]["val_loss"]
    assert records[1]["status"] == "finished"
    leftovers = [p.name for p in other.folder.iterdir() if "partial" in p.name or p.name == "state"]
    assert not leftovers


NOISY = ("steps=40", "checkpoint_every=3", "model.state_init=normal")


def test_a_run_killed_three_times_ends_with_the_same_bits(recipe, tmp_path):
    assert_same_end(*run_tortured(recipe, tmp_path, 1, 3, *NOISY))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sharding"), [(1, "none"), (2, "none"), (2, "fsdp2")], ids=["one", "ddp", "fsdp2"]
)
def test_a_run_killed_at_twenty_random_moments_ends_with_the_same_bits(
    recipe, tmp_path, world, sharding
):
    """Each in a folder of its own, so that some kills hit the packing of the data."""
    fields = (*NOISY, f"sharding={sharding}", f"out={tmp_path / 'runs'}")
    assert_same_end(*run_tortured(recipe, tmp_path, world, 20, *fields))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB, where this user may mount one; grows when called."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield (
        place,
        lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True),
    )
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_stops_with_a_message_and_the_run_goes_on_with_room(
    recipe, tmp_path, small_disk, capsys
):
    """Weights and moments of one state take 0.3 MB; twelve of them are kept, so the disk fills up on the way."""
    place, grow = small_disk
    fields = ("steps=16", "checkpoint_every=1", "checkpoints_kept=12", "model.hidden_size=32")
    straight, config = recipe("roomy", *fields), recipe("cramped", *fields, f"out={place}")
    train(straight)
    save_config(config, tmp_path / "recipe.yaml")
    command = ["--config", str(tmp_path / "recipe.yaml")]
    assert main(command) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "No space left" in said and "is whole. Free disk space" in said
    states = sorted(p.name for p in (config.folder / "state").iterdir())
    assert len(states) > 2 and not any("partial" in name for name in states)
    grow()
    assert main(command) == 0
    assert_same_end(straight, config)


@pytest.fixture
def file_limit():
    """file_limit(bytes): files of this process can't grow beyond that; None lifts it. Needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        soft = before[0] if size is None else size
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    limit(None)


def test_a_state_that_cannot_be_written_leaves_the_older_ones_and_the_run_goes_on(
    recipe, tmp_path, file_limit, monkeypatch, capsys
):
    """From step 6 on no file may have more than 20 kB: enough for the log, but not for weights."""
    fields = ("steps=8", "checkpoint_every=2")
    straight, config = recipe("unlimited", *fields), recipe("limited", *fields)
    train(straight)
    save_config(config, tmp_path / "recipe.yaml")
    whole = loop._Run._step

    def limited(run, step, watch):
        if step == 5:
            file_limit(20_000)
        return whole(run, step, watch)

    command = ["--config", str(tmp_path / "recipe.yaml")]
    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_step", limited)
        assert main(command) == 2
    file_limit(None)
    said = " ".join(capsys.readouterr().err.split())
    assert "the state after step 6 can't be written" in said and "step-000000004 is whole" in said
    assert [p.name[-1] for p in sorted((config.folder / "state").iterdir())] == ["2", "4"]
    assert json.loads((config.folder / "run.json").read_text())["status"] == "failed"
    assert main(command) == 0
    assert_same_end(straight, config)


def test_damaged_data_stop_a_run_and_it_goes_on_when_they_are_restored(recipe, tmp_path):
    config, straight = (
        recipe(name, f"out={tmp_path / 'runs'}") for name in ("after-damage", "before-damage")
    )
    train(straight)
    shard = next(iter(sorted((open_packed(config.data_folder).folder / "train").iterdir())))
    good = shard.read_bytes()
    shard.write_bytes(good[:-5] + bytes([good[-5] ^ 4]) + good[-4:])
    with pytest.raises(ValueError, match=shard.name):
        train(config)
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        train(config)
    shard.write_bytes(good)
    train(config)
    assert_same_end(straight, config)


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_raises_changes_nothing_but_a_warning(
    recipe, monkeypatch, caplog, method, recwarn
):
    straight, config = recipe("untracked"), recipe(f"tracked-{method}", "report_to=tensorboard")
    train(straight)

    def broken(*_, **__):
        raise ConnectionError("no route to the server")

    monkeypatch.setattr(accelerate.tracking.TensorBoardTracker, method, broken)
    train(config)
    assert "tensorboard" in caplog.text and "no route to the server" in caplog.text
    assert_same_end(straight, config)
