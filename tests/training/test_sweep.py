"""A grid from plan to run table: what runs, what is skipped, and what a failure does to the rest."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from omegaconf import OmegaConf
from rich.console import Console

import training
from hf_looped.accounting import train_flops_per_token
from scaling.runs import read_table
from training import sweep, workers
from training.claims import claim, holder
from training.config import resolve, save_config
from training.grid import PlannedRun, expand, load_grid
from training.ledger import read_plan
from training.loop import train
from training.record import architecture_of, describe, read_record
from training.sweep import main, run_grid

ROOT = Path(training.__file__).parents[1]


@dataclass
class Call:
    """What one call of the command gave: exit status, text, and the run table after it."""

    status: int
    text: str
    table: pd.DataFrame | None


def call(out, grid, *arguments):
    stream = io.StringIO()
    with redirect_stderr(stream), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        status = main(["--grid", str(grid), "--out", str(out), *arguments])
    table = read_table(out / "runs.csv") if (out / "runs.csv").is_file() else None
    return Call(status, stream.getvalue(), table)


@pytest.fixture(scope="module")
def grid(recipe_fields, tmp_path_factory):
    """2 widths × r ∈ {1, 2} at a budget of about four steps."""
    folder = tmp_path_factory.mktemp("grid")
    OmegaConf.save(OmegaConf.create(recipe_fields | {"steps": 1}), folder / "tiny.yaml")
    architecture = architecture_of(resolve(recipe_fields | {"steps": 1}))
    flops = 4 * 128 * train_flops_per_token(architecture, 32)
    (folder / "grid.yaml").write_text(
        f"recipe: {folder / 'tiny.yaml'}\nrecurrences: [1, 2]\n"
        f"budgets: [{{flops: {float(flops)}, widths: [16, 24]}}]\n"
    )
    return folder / "grid.yaml"


@pytest.fixture(scope="module")
def swept(grid, tmp_path_factory):
    """Plan alone; sweep with one folder in the way; launch the one that is missing without it; and once more."""
    out = tmp_path_factory.mktemp("sweep") / "runs"
    dry = call(out, grid, "--dry-run")
    assert not out.exists()
    configs = expand(load_grid(str(grid)), str(out))
    blocked = configs[1]
    blocked.folder.mkdir(parents=True)
    save_config(replace(blocked, seed=99), blocked.folder / "config.yaml")
    first = call(out, grid, "--jobs", "1")
    shutil.rmtree(blocked.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("OMP_NUM_THREADS", "1")
        second = call(out, grid, "--launch")
    before = {path: path.read_bytes() for path in out.glob("*/run.json")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_Worker", lambda: pytest.fail("started a worker"))
        third = call(out, grid, "--jobs", "1")
    assert before == {path: path.read_bytes() for path in out.glob("*/run.json")}
    return configs, dry, first, second, third


def test_a_dry_run_prints_the_plan_and_exits_0(swept):
    configs, dry, *_ = swept
    assert dry.status == 0 and "4 runs" in dry.text
    for config in configs:
        record = describe(config, architecture_of(config))
        (line,) = [line for line in dry.text.splitlines() if config.name in line]
        n = record["n_once"] + record["n_rec"]
        for value in (n, record["tokens"], record["steps"]):
            assert f" {value:,} " in line
        assert f"{record['total_flops']:.3g}" in line


def test_a_dry_run_says_what_the_grid_takes(swept):
    """GPU-hours at the defaults, 40 % of an H100's 9.89e14 FLOPs/s; disk as in test_costs."""
    configs, dry, *_ = swept
    flops = sum(describe(c, architecture_of(c))["total_flops"] for c in configs)
    assert f"GPU-hours: {flops / (0.4 * 9.89e14 * 3600):.3g} at 40%" in dry.text
    assert "at the end" in dry.text and "left. Free some" not in dry.text


def test_gpu_hours_are_those_at_the_mfu_and_the_peak_that_are_asked_for(swept, grid, tmp_path):
    configs = swept[0]
    flops = sum(describe(c, architecture_of(c))["total_flops"] for c in configs)
    asked = ("--dry-run", "--mfu", "0.2", "--peak-flops", "1e15")
    text = call(tmp_path / "out", grid, *asked).text
    assert f"GPU-hours: {flops / (0.2 * 1e15 * 3600):.3g} at 20% of 1e+15 FLOPs/s" in text
    refused = call(tmp_path / "out", grid, "--dry-run", "--mfu", "0")
    assert refused.status == 2 and "--mfu is 0.0" in refused.text


def test_a_failing_run_is_reported_and_the_others_finish(swept):
    configs, _, first, *_ = swept
    assert first.status == 1
    (line,) = [line for line in first.text.splitlines() if line.startswith("failed: ")]
    assert configs[1].name in line and "another recipe" in line
    assert "3 of 4 runs finished" in first.text
    assert set(first.table["run_id"]) == {c.name for c in configs} - {configs[1].name}


def test_the_next_call_runs_what_is_missing_and_skips_the_rest(swept):
    configs, _, _, second, _ = swept
    assert second.status == 0
    assert "3 of 4 runs have ended before and are skipped" in second.text
    assert "4 of 4 runs finished" in second.text
    assert set(second.table["run_id"]) == {config.name for config in configs}


def test_a_complete_grid_trains_nothing(swept):
    *_, second, third = swept
    assert third.status == 0 and "4 of 4 runs have ended before" in third.text
    pd.testing.assert_frame_equal(second.table, third.table)


def test_the_run_table_is_what_scaling_reads(swept):
    """A row for each run, from its record; every needed column filled."""
    configs, *_, third = swept
    table = third.table.set_index("run_id")
    assert len(table) == 4 and (table["status"] == "finished").all()
    for config in configs:
        record = json.loads((config.folder / "run.json").read_text())
        row = table.loc[config.name]
        for name in ("recurrences", "n_once", "n_rec", "tokens", "val_loss", "budget_flops"):
            assert row[name] == record[name]
        assert record["attention"] and record["precision"] == "fp32"
    assert set(zip(table["recurrences"], table["hidden_size"], strict=True)) == {
        (1, 16), (1, 24), (2, 16), (2, 24),
    }  # fmt: skip


def test_every_architecture_of_a_grid_has_the_same_data(swept):
    table = swept[-1].table
    assert table["data_fingerprint"].nunique() == table["val_fingerprint"].nunique() == 1
    assert table["val_tokens"].nunique() == 1 and (table["steps"] > 1).all()


def test_a_run_started_by_accelerate_launch_is_the_one_that_train_gives(swept):
    """The second call was `--launch`; the recipe trained here has its loss, up to the order of sums."""
    configs, *_, third = swept
    row = third.table.set_index("run_id").loc[configs[1].name]
    twin = train(replace(configs[1], run_id="twin"))
    assert row["val_loss"] == pytest.approx(twin["val_loss"], rel=1e-5)


def test_variants_with_other_data_are_refused_before_anything_runs(recipe_fields, tmp_path):
    fields = recipe_fields | {"steps": 1, "out": str(tmp_path)}
    configs = [resolve(fields, ["run_id=a"]), resolve(fields, ["run_id=b", "data.vocab_size=301"])]
    runs = [
        PlannedRun(config=c, record=describe(c, architecture_of(c)), seconds=1.0) for c in configs
    ]
    with pytest.raises(ValueError, match="data differs between variants"):
        run_grid(runs, tmp_path, 1, False, Console(quiet=True))
    assert not any(tmp_path.iterdir())


def test_bad_input_exits_2_with_one_error_and_leaves_nothing(grid, tmp_path):
    cases = {
        ("--grid", "none"): "--grid is 'none': no such grid",
        ("--grid", str(grid), "model.head_dim=5"): "hidden_size is 16",
        ("--grid", str(grid), "model.hiden=5"): "model.hiden",
        ("--grid", str(grid), "batch_tokens=33"): "batch_tokens is 33",
    }
    for arguments, words in cases.items():
        done = call(tmp_path / "out", arguments[1], *arguments[2:])
        assert done.status == 2 and words in done.text, arguments
        assert done.text.startswith("error: ") and "Traceback" not in done.text
    assert not (tmp_path / "out").exists()


def test_a_grid_that_asks_for_more_tokens_than_there_are_runs_nothing(grid, tmp_path):
    text = grid.read_text()
    start = text.index("flops: ") + len("flops: ")
    (tmp_path / "large.yaml").write_text(text[:start] + "1e11" + text[text.index(",", start) :])
    done = call(tmp_path / "out", tmp_path / "large.yaml", "--jobs", "1")
    assert done.status == 2 and "data.allow_repeat=true" in done.text
    assert not list((tmp_path / "out").glob("*/run.json"))


def copy_runs(configs, out):
    for name in ("data", *(config.name for config in configs)):
        shutil.copytree(Path(configs[0].out) / name, out / name)
    return out


def test_runs_of_another_grid_in_the_folder_are_named(swept, tmp_path):
    configs, *_ = swept
    out = copy_runs(configs, tmp_path / "runs")
    runs = [
        PlannedRun(
            config=replace(c, out=str(out)), record=describe(c, architecture_of(c)), seconds=1.0
        )
        for c in configs[:3]
    ]
    stream = io.StringIO()
    assert run_grid(runs, out, 1, False, Console(file=stream, width=300)) == 0
    assert f"1 further runs in {out}" in stream.getvalue() and configs[3].name in stream.getvalue()


@pytest.fixture
def pretended(swept, tmp_path, monkeypatch):
    """A copy of the swept folder, and the names of the runs that a sweep over it would train, call by call."""
    out = copy_runs(swept[0], tmp_path / "runs")
    trained = []

    def pretend(runs, jobs, console):
        trained.append([run.config.name for run in runs])
        return {run.config.name: "finished" for run in runs}

    monkeypatch.setattr(sweep, "run_here", pretend)
    return out, trained


def fail(config, out):
    path = out / config.name / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"status": "failed", "error": "RuntimeError: no"}))


def test_a_finished_run_of_another_recipe_is_not_taken_for_done(swept, grid, pretended):
    """Names don't tell learning rates apart: a changed recipe in the same folder is trained, which refuses it."""
    configs, (out, trained) = swept[0], pretended
    again = call(out, grid, "--jobs", "1", "optimizer.muonh_lr=0.001")
    assert "ended before" not in again.text
    assert set(trained[0]) == {config.name for config in configs}


def test_runs_that_another_sweep_trains_are_no_failures(swept, grid, pretended, monkeypatch):
    configs, (out, _) = swept[0], pretended
    shutil.rmtree(out / configs[0].name)
    monkeypatch.setattr(sweep, "run_here", lambda *_: {configs[0].name: "claimed elsewhere"})
    done = call(out, grid, "--jobs", "1")
    assert done.status == 0 and "1 runs are being trained by another sweep" in done.text
    assert "3 of 4 runs finished" in done.text and len(done.table) == 3


def test_failed_runs_are_tried_again_only_when_asked(swept, grid, pretended):
    configs, (out, trained) = swept[0], pretended
    fail(configs[2], out)
    skipped = call(out, grid, "--jobs", "1")
    assert skipped.status == 1 and trained == [[]]
    assert (
        f"1 runs failed before and were skipped ({configs[2].name}); --retry-failed" in skipped.text
    )
    assert "3 of 4 runs finished" in skipped.text
    again = call(out, grid, "--jobs", "1", "--retry-failed")
    assert again.status == 0 and trained[1] == [configs[2].name]


def test_an_interrupted_run_is_resumed_and_a_diverged_one_is_not(swept, grid, pretended):
    configs, (out, trained) = swept[0], pretended
    for config, status in zip(configs, ("running", "diverged"), strict=False):
        path = out / config.name / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": status}))
    done = call(out, grid, "--jobs", "1", "--retry-failed")
    assert trained == [[configs[0].name]]
    assert done.status == 0 and f"diverged: {configs[1].name}" in done.text


def test_grids_that_share_a_folder_share_its_plan(swept, grid, pretended):
    configs, (out, _) = swept[0], pretended
    assert not (out / "plan.json").exists()
    call(out, grid, "--jobs", "1", "budget_flops=null", "steps=9", "data.allow_repeat=true")
    call(out, grid, "--jobs", "1")
    planned = read_plan(out)
    assert len(planned) == 8 and {config.name for config in configs} < planned.keys()
    for config in configs:
        record = describe(config, architecture_of(config))
        entry = planned[config.name]
        assert entry.pop("seconds") > 0
        assert entry == {name: record[name] for name in ("steps", "batch_tokens", "total_flops")}


def test_the_status_command_shows_what_the_sweep_left(swept, grid, pretended, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    configs, (out, _) = swept[0], pretended
    fail(configs[2], out)
    call(out, grid, "--jobs", "1", "--retry-failed")
    assert main(["status", str(out)]) == 0
    text = capsys.readouterr().out
    assert "4 runs: 1 failed, 3 done" in text and "RuntimeError: no" in text
    assert all(config.name in text for config in configs)


def test_a_disk_too_small_for_what_is_missing_is_named(swept, grid, pretended, monkeypatch):
    configs, (out, _) = swept[0], pretended
    monkeypatch.setattr(sweep, "free_bytes", lambda out: 1000)
    assert "of disk" not in call(out, grid, "--jobs", "1").text  # nothing is missing
    shutil.rmtree(out / configs[0].name)
    assert f"of disk, and {out} has 1.0 kB left" in call(out, grid, "--jobs", "1").text


def test_jobs_are_submitted_for_what_nobody_has_trained_or_trains(
    swept, grid, pretended, monkeypatch
):
    configs, (out, trained) = swept[0], pretended
    submitted = []

    def submit(runs, folder, cluster, settings):
        submitted.append(([run.config.name for run in runs], folder, cluster, settings))
        return [SimpleNamespace(job_id=f"70{number}") for number, _ in enumerate(runs)]

    monkeypatch.setattr(sweep, "submit", submit)
    for config in configs[:3]:
        shutil.rmtree(out / config.name)
    with claim(out / configs[1].name):
        settings = ["timeout_min=60", "slurm_partition=long"]
        done = call(out, grid, "checkpoints_kept=1", "--submit", "slurm", "--slurm", *settings)
    assert done.status == 0 and not trained
    ((names, folder, cluster, passed),) = submitted
    assert set(names) == {configs[0].name, configs[2].name}
    assert (folder, cluster, passed) == (out, "slurm", settings)
    assert "job 700: " in done.text and "job 701: " in done.text
    assert "2 jobs submitted, 1 runs are being trained already" in done.text
    assert f"python -m training.sweep status {out}" in done.text


@pytest.fixture(scope="module")
def long_sweep(grid, tmp_path_factory):
    """Command of a sweep of one run that takes far longer than any test waits, and its folder."""
    out = tmp_path_factory.mktemp("long") / "runs"
    text = grid.read_text().replace("[1, 2]", "[2]").replace("[16, 24]", "[16]")
    (grid.parent / "long.yaml").write_text(text)
    overrides = [
        "budget_flops=null",
        "steps=100000",
        "data.allow_repeat=true",
        "checkpoint_every=5",
    ]
    command = [sys.executable, "-m", "training.sweep", "--grid", str(grid.parent / "long.yaml")]
    return [*command, "--out", str(out), "--jobs", "1", *overrides], out


@pytest.fixture
def start():
    """start(command) → a process; it and its workers are killed at the end, whatever the test came to."""
    processes = []

    def begin(command):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes.append(psutil.Popen(command, cwd=ROOT, **quiet))
        return processes[-1]

    yield begin
    for process in processes:
        family = [*process.children(recursive=True), process] if process.is_running() else []
        for member in family:
            member.kill()
        process.wait()


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def last_step(out):
    logs = [path.read_text().splitlines() for path in out.glob("*/log.jsonl")]
    return max((json.loads(lines[-1])["step"] for lines in logs if lines), default=0)


@pytest.mark.slow
def test_an_interrupted_sweep_saves_and_resumes_and_a_killed_one_leaves_no_workers(
    long_sweep, start
):
    command, out = long_sweep
    first = start(command)
    wait_until(lambda: last_step(out) >= 3)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    (state,) = out.glob("*/state/step-*")
    saved = int(state.name.removeprefix("step-"))
    assert saved >= 3 and not list(out.glob("*/state/*.partial"))

    second = start(command)
    wait_until(lambda: last_step(out) >= saved + 3)
    steps = [
        json.loads(line)["step"]
        for p in out.glob("*/log.jsonl")
        for line in p.read_text().splitlines()
    ]
    assert steps == list(
        range(1, len(steps) + 1)
    )  # resumed where it stopped: no step twice, none lost
    workers = psutil.Process(second.pid).children(recursive=True)
    second.kill()
    second.wait(60)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


@pytest.mark.slow
def test_an_interrupted_launch_saves_too(long_sweep, start):
    """The sweep alone is signalled: the training is in a session of its own, out of reach of the terminal."""
    command, out = long_sweep
    shutil.rmtree(out, ignore_errors=True)
    first = start([*command, "--launch"])
    wait_until(lambda: last_step(out) >= 3)
    (folder,) = (path.parent for path in out.glob("*/run.json"))
    training_process = psutil.Process(holder(folder).pid)
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 130
    assert not training_process.is_running() and holder(folder) is None
    assert list(out.glob("*/state/step-*"))


def grid_command(grid, out, *overrides):
    command = [sys.executable, "-m", "training.sweep", "--grid", str(grid), "--out", str(out)]
    fields = ["budget_flops=null", "steps=40", "data.allow_repeat=true", "checkpoint_every=5"]
    return [*command, "--jobs", "1", *fields, *overrides]


@pytest.mark.slow
def test_two_sweeps_at_once_train_every_run_once(grid, tmp_path, start):
    """While a run's record says running, one process holds it, and never another one."""
    out = tmp_path / "runs"
    sweeps = [start(grid_command(grid, out)) for _ in range(2)]
    trainers = defaultdict(set)
    while any(process.poll() is None for process in sweeps):
        for note in out.glob(".claims/*.holder"):
            folder = out / note.stem
            before, record, after = holder(folder), read_record(folder), holder(folder)
            if before and before == after and record and record["status"] == "running":
                trainers[folder.name].add(before.pid)
        time.sleep(0.02)
    assert [process.returncode for process in sweeps] == [0, 0]
    table = read_table(out / "runs.csv")
    assert len(table) == 4 and (table["status"] == "finished").all()
    assert all(len(pids) == 1 for pids in trainers.values()) and len(trainers) == 4
    for log in out.glob("*/log.jsonl"):
        steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
        assert steps == list(range(1, 41))


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_is_resumed_while_the_others_go_on(grid, tmp_path, start):
    out = tmp_path / "runs"
    process = start(grid_command(grid, out, "steps=120"))
    wait_until(lambda: last_step(out) >= 8)
    (folder,) = (path.parent for path in out.glob("*/run.json"))
    os.kill(holder(folder).pid, signal.SIGKILL)
    assert process.wait(600) == 0
    table = read_table(out / "runs.csv")
    assert len(table) == 4 and (table["status"] == "finished").all()
    steps = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 121))


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--jobs=-1", "--jobs is -1: at least one"),
        ("out=elsewhere", "a sweep sets out"),
        ("run_id=mine", "a sweep sets out"),
    ],
)
def test_what_a_sweep_sets_itself_cannot_be_overridden(grid, tmp_path, argument, message):
    refused = call(tmp_path / "runs", grid, "--dry-run", argument)
    assert refused.status == 2 and message in refused.text
