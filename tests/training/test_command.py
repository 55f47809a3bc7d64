"""The command: launches that it takes, exit status, signals, and what it prints."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import training
from training import loop
from training.command import main
from training.config import save_config
from training.hardware import check_launch
from training.loop import train

ROOT = Path(training.__file__).parents[1]


@pytest.fixture(scope="module")
def finished(recipe):
    config = recipe("command", "steps=2")
    return config, train(config)


def test_a_launch_that_silently_became_one_process_is_refused(monkeypatch):
    """What `accelerate launch --cpu --num_processes 2` sets, and what torchrun and a plain start set."""
    for name in ("ACCELERATE_USE_CPU", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    check_launch()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    check_launch()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    with pytest.raises(ValueError, match="num_processes is above 1.*only one process.*torchrun"):
        check_launch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_launch()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("MASTER_ADDR")
    check_launch()  # accelerate launch --cpu --num_processes 1


def test_accelerate_s_own_fsdp_is_refused_with_a_reason(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        ValueError, match=r"sharding=fsdp2 .*FSDP1 can't be used.*MuonH needs whole"
    ):
        check_launch()


def test_accelerate_launch_with_two_cpu_processes_is_refused_and_names_torchrun(recipe, tmp_path):
    """accelerate's own launcher hides the exit status 2 behind 1, but names it."""
    save_config(recipe("launched", f"out={tmp_path}"), tmp_path / "recipe.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*launch, "-m", "training", "--config", str(tmp_path / "recipe.yaml")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert "torchrun" in done.stderr and "exit status 2" in done.stderr
    assert not (tmp_path / "launched").exists()


def run_main(config, tmp_path, *fields):
    save_config(config, tmp_path / "recipe.yaml")
    return main(["--config", str(tmp_path / "recipe.yaml"), *fields])


def test_the_command_prints_loss_and_place_and_exits_0(finished, tmp_path, capsys):
    config, record = finished
    assert run_main(config, tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"{record['val_loss']:.4f}" in printed and str(config.folder / "checkpoint") in printed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["model.recurrences=0"], "recurrences is 0"),
        (["data.sequence_length=16", "run_id=other-T-again"], "was made with 32"),
        (["seed=1"], "another recipe"),
        (["oops"], "field=value"),
    ],
)
def test_bad_input_prints_one_error_and_exits_2(finished, tmp_path, capsys, fields, words):
    assert run_main(finished[0], tmp_path, *fields) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.startswith("error: ") and words in printed
    assert "Traceback" not in printed


def test_the_command_exits_1_when_diverged(recipe, tmp_path, monkeypatch, capsys):
    norms = {"gradient_norm": 1.0}
    monkeypatch.setattr(loop._Run, "_step", lambda run, step, watch: (float("nan"), norms, {}))
    assert run_main(recipe("cli-diverged"), tmp_path) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "cli-diverged diverged at step 1: not finite: loss" in said


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ((signal.SIGINT,), 130),
        ((signal.SIGTERM,), 75),
        ((signal.SIGUSR1,), 75),
        ((signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM), 75),  # as schedulers send them
    ],
    ids=["SIGINT", "SIGTERM", "SIGUSR1", "repeated"],
)
def test_a_signal_saves_the_state_after_the_step_and_the_status_says_resume(
    recipe, tmp_path, monkeypatch, capsys, numbers, status
):
    config = recipe("-".join(["signal", *map(str, numbers)]), "steps=3")
    whole = loop._Run._step

    def signalling(run, step, watch):
        for number in numbers if step == 1 else ():
            os.kill(os.getpid(), number)
        return whole(run, step, watch)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_step", signalling)
        assert run_main(config, tmp_path) == status
    assert "Run the same command again" in " ".join(capsys.readouterr().err.split())
    assert [p.name[-1] for p in (config.folder / "state").iterdir()] == ["2"]
    assert run_main(config, tmp_path) == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_before_the_first_step_interrupts_at_once(
    recipe, tmp_path, monkeypatch, number, status
):
    config = recipe(f"early-{number}", "steps=1")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "prepare", lambda *_, **__: os.kill(os.getpid(), number))
        assert run_main(config, tmp_path) == status
    assert not (config.folder / "state").exists()


def test_a_second_ctrl_c_does_not_wait_for_the_step(recipe, tmp_path, monkeypatch):
    reached = []

    def signalling(run, step, watch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(step)

    whole = loop._Run._step
    monkeypatch.setattr(
        loop._Run,
        "_step",
        lambda run, step, watch: (signalling if step else whole)(run, step, watch),
    )
    assert run_main(recipe("twice-ctrl-c", "steps=3"), tmp_path) == 130
    assert not reached


def test_report_to_is_a_flag_too(finished, tmp_path, capsys):
    """A tracker that is not installed is named before anything is trained."""
    assert run_main(finished[0], tmp_path, "--report_to", "no-such-tracker") == 2
    assert "report_to is 'no-such-tracker'" in " ".join(capsys.readouterr().err.split())
