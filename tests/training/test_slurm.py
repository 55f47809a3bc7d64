"""Runs as submitit's jobs: preempted ones are queued again and end as if nothing had been."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

import training
from tests.training import pretend_training
from training import slurm
from training.claims import claim
from training.config import load_config, save_config
from training.grid import PlannedRun
from training.loop import train
from training.record import architecture_of, describe
from training.slurm import TrainingJob, read_settings, submit

submitit = pytest.importorskip("submitit")
ROOT = Path(training.__file__).parents[1]


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def job(monkeypatch, recipe, tmp_path):
    """A job whose training is a pretended one below a launcher."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(slurm, "SIGNAL_WAIT_S", 0)
    config = recipe("run", f"out={tmp_path / 'runs'}")
    config.folder.mkdir(parents=True)
    save_config(config, config.folder / "config.yaml")
    command = [sys.executable, pretend_training.__file__, "--launcher", str(config.folder)]
    monkeypatch.setattr(slurm, "_command", lambda recipe: command)
    return TrainingJob(config, patience_s=20)


class Preempted(Exception):
    """As submitit does, the handler leaves the job by an exception."""


def test_a_preempted_job_saves_and_the_next_one_goes_on(job, monkeypatch):
    """The checkpoint is asked for in a signal handler, in the middle of the job's waiting."""
    again = []

    def preempt(number, frame):
        again.append(job.checkpoint())
        raise Preempted

    steps = job.config.folder / "steps"
    steps.write_text("1000000")
    before = signal.signal(signal.SIGALRM, preempt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        with pytest.raises(Preempted):
            job()
    finally:
        signal.signal(signal.SIGALRM, before)
    job.process.wait(10)
    saved = int((job.config.folder / "saved").read_text())
    assert (
        saved > 0
        and json.loads((job.config.folder / "run.json").read_text())["status"] == "running"
    )
    steps.write_text(str(saved + 3))
    assert again[0].result() == "finished"  # submitit calls what `checkpoint` returned
    assert json.loads((job.config.folder / "run.json").read_text())["steps_done"] == saved + 3
    assert (job.config.folder.parent / "runs.csv").read_text().count("\n") == 2  # header and run


def test_a_job_without_a_result_fails_with_the_reason(job):
    (job.config.folder / "steps").write_text("no number")
    with pytest.raises(RuntimeError, match="run: the training ended without a result"):
        job()
    pretend_training.write(job.config.folder, status="failed", error="ValueError: no corpus")
    (job.config.folder / "steps").unlink()
    job.process.wait()
    slurm_command = [sys.executable, "-c", "pass"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "_command", lambda recipe: slurm_command)
        with pytest.raises(RuntimeError, match="run: ValueError: no corpus"):
            job()


def test_a_job_of_a_claimed_run_ends_without_an_error(job):
    (job.config.folder / "steps").write_text("3")
    pretend_training.write(job.config.folder, status="running", run_id="run")
    with claim(job.config.folder):
        assert job() == "claimed elsewhere"


def test_a_job_starts_one_process_for_each_gpu_it_sees(monkeypatch):
    recipe = Path("out/recipes/run.yaml")
    for gpus, words in ((0, ""), (1, "--num_processes 1"), (8, "--num_processes 8")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        command = " ".join(slurm._command(recipe))
        assert command.endswith("-m training --config out/recipes/run.yaml") and words in command
        assert ("accelerate" in command) == (gpus > 0)
        # Two jobs on one node must not meet at one port.
        assert ("--multi_gpu --main_process_port 0" in command) == (gpus > 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["gpus_per_node=8"], "timeout_min is missing"),
        (["timeout_min"], "'timeout_min' is not of the form key=value"),
        (["timeout_min=60", "nodes=2"], "nodes is 2: a run is one task on one node"),
        (["timeout_min=60", "tasks_per_node=8"], "tasks_per_node is 8"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        read_settings(settings)


def test_settings_and_clusters_that_submitit_refuses_are_named(tmp_path):
    with pytest.raises(ValueError, match="--submit local: .*gpu_per_node"):
        submit([], tmp_path, "local", ["timeout_min=60", "gpu_per_node=8"])
    with pytest.raises(ValueError, match="--submit slurm: "):
        submit([], tmp_path, "slurm", ["timeout_min=60"])  # there is no Slurm here


def test_a_missing_submitit_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install -e .\[slurm\]"):
        submit([], tmp_path, "local", ["timeout_min=60"])


@pytest.mark.slow
def test_jobs_train_to_the_end_and_a_preempted_one_has_the_weights_of_an_undisturbed_run(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    configs = [
        recipe("job", f"out={tmp_path}", "steps=120", "data.allow_repeat=true"),
        recipe("job-preempted", f"out={tmp_path}", "steps=120", "data.allow_repeat=true"),
    ]
    runs = [
        PlannedRun(config=c, record=describe(c, architecture_of(c)), seconds=1.0) for c in configs
    ]
    plain, preempted = submit(runs, tmp_path, "local", ["timeout_min=10"])
    log = configs[1].folder / "log.jsonl"
    wait_until(lambda: log.is_file() and log.read_text().count("\n") >= 5)
    # LocalJob._interrupt would signal the controller, which has no handler; its child is the job.
    (task,) = psutil.Process(int(preempted.job_id)).children()
    os.kill(task.pid, signal.SIGUSR2)
    assert plain.result() == preempted.result() == "finished"
    texts = [
        (tmp_path / "jobs" / f"{preempted.job_id}_0_log.{kind}").read_text()
        for kind in ("out", "err")
    ]
    assert "Requeued job" in "".join(texts)
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(1, 121))  # none twice, none lost
    torch.set_num_threads(1)
    weights = [load_file(c.folder / "checkpoint" / "model.safetensors") for c in configs]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    table = (tmp_path / "runs.csv").read_text()
    assert table.count("finished") == 2
    assert train(configs[0])["status"] == "finished"  # nothing is left to do
    assert load_config(tmp_path / "recipes" / "job.yaml") == configs[0]
