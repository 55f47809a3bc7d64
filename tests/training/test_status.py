"""The table of a sweep's runs, from files made by hand: every state, torn files, the time that is left."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import training
from training import status
from training.claims import claim
from training.status import look, main, time_left

ROOT = Path(training.__file__).parents[1]
PLAN = {"steps": 100, "batch_tokens": 64, "total_flops": 1e9, "seconds": 50.0}


@pytest.fixture
def out(tmp_path):
    """Plan of ten runs that wait."""
    plan = {f"run-{number}": PLAN for number in range(10)}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path


def record(out, name, status, **fields):
    (out / name).mkdir(exist_ok=True)
    values = {"run_id": name, "status": status, "steps": 100, "batch_tokens": 64}
    (out / name / "run.json").write_text(json.dumps(values | fields))


@contextmanager
def running(out, name, log="", timing=None):
    record(out, name, "running")
    (out / name / "log.jsonl").write_text(log)
    if timing is not None:
        (out / name / "timing.jsonl").write_text(timing)
    with claim(out / name):
        yield


def words(out):
    return {run.run_id: f"{run.state}: {run.words}" for run in look(out)}


def test_every_state_is_told_from_the_files(out):
    record(out, "run-0", "finished", val_loss=3.25)
    record(out, "run-1", "diverged", diverged_step=7)
    record(out, "run-2", "failed", error="ValueError: no such corpus")
    record(out, "run-3", "running")  # and nobody holds it
    (out / "run-3" / "log.jsonl").write_text('{"step": 40, "loss": 5.0}\n')
    record(out, "other-grid", "finished", val_loss=2.0)
    with (
        running(
            out, "run-4", '{"step": 20, "loss": 4.5}\n', '{"step": 20, "tokens_per_s": 64.0}\n'
        ),
        claim(out / "run-5"),  # it has just begun
    ):
        found = words(out)
    assert found["run-0"] == "done: val_loss 3.2500"
    assert found["run-1"] == "diverged: at step 7"
    assert found["run-2"] == "failed: ValueError: no such corpus"
    assert found["run-3"] == "interrupted: 40/100 steps"
    # 80 steps of 64 tokens at 64 tokens/s
    assert found["run-4"].startswith(
        "running: 20/100 steps, loss 4.500, 64 tokens/s, 80 s left, process "
    )
    assert found["run-5"].startswith("running: 0/100 steps, 50 s left, process ")
    assert found["run-6"] == "waiting: "
    assert found["other-grid"] == "done: val_loss 2.0000"
    assert len(found) == 11


def test_a_failed_run_that_is_tried_again_is_running(out):
    record(out, "run-0", "failed", error="no")
    with claim(out / "run-0"):
        assert words(out)["run-0"].startswith("running")
    assert words(out)["run-0"] == "failed: no"


@pytest.mark.parametrize(
    ("log", "timing", "shown"),
    [
        ('{"step": 10, "loss": 4.0, "tokens_per_s": 128.0}\n', None, "loss 4.000, 128 tokens/s, 45 s"),
        ('{"step": 10, "loss": 4.0}\n{"step": 20, "lo', '{"step": 10, "tokens_per_s": 1', "loss 4.000, 45 s"),
        ('{"step": 10, "loss": 4.0}\nnull\n\x00\x00\n', "", "loss 4.000, 45 s"),
        ('{"st', None, "0/100 steps, 50 s"),
        ("", None, "0/100 steps, 50 s"),
    ],
    ids=["speed in the log", "torn", "noise", "torn first line", "empty"],
)  # fmt: skip
def test_torn_and_missing_logs_are_passed_over(out, log, timing, shown):
    """Without a speed, the time left is what was planned, less the share that is done."""
    with running(out, "run-0", log, timing):
        assert shown + " left" in words(out)["run-0"]


def test_a_long_log_is_read_from_its_end(out):
    entries = [json.dumps({"step": step, "loss": 9.0, "pad": "x" * 200}) for step in range(1, 1001)]
    with running(out, "run-0", "\n".join(entries[:77]) + "\n"):
        assert "77/100 steps" in words(out)["run-0"]
    (out / "run-0" / "log.jsonl").write_text("\n".join(entries) + "\n")
    assert status.last_entry(out / "run-0" / "log.jsonl")["step"] == 1000


def test_the_time_left_is_that_of_all_runs_at_the_pace_of_now(out):
    """Ended runs took twice what was planned, so waiting ones will; two run at a time.

    7 waiting · 100 s + 80 s + 40 s, halved.
    """
    record(out, "run-0", "finished", val_loss=3.0, wall_s=100.0)
    log = '{{"step": 20, "loss": 4.0, "tokens_per_s": {}}}\n'
    with running(out, "run-1", log.format(64)), running(out, "run-2", log.format(128)):
        assert time_left(look(out)) == pytest.approx((7 * 100 + 80 + 40) / 2)
    assert time_left(look(out)) is None


def test_the_last_run_takes_as_long_as_it_takes(out):
    """No number of other runs that are nearly done makes it quicker."""
    for number in range(7):
        record(out, f"run-{number}", "finished", val_loss=3.0)
    log = '{{"step": {}, "tokens_per_s": 64}}\n'
    with (
        running(out, "run-7", log.format(99)),
        running(out, "run-8", log.format(99)),
        running(out, "run-9", log.format(10)),
    ):
        assert time_left(look(out)) == pytest.approx(90)


def test_it_is_printed_once_where_there_is_no_terminal(out, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    record(out, "run-0", "finished", val_loss=3.25)
    record(out, "run-1", "failed", error="disk [/dev/sda] is full")
    assert main([str(out)]) == 0
    text = capsys.readouterr().out
    assert "10 runs: 1 failed, 8 waiting, 1 done; nothing is running" in text
    assert "disk [/dev/sda] is full" in text  # not taken for markup
    assert (
        text.index("run-1") < text.index("run-2") < text.index("run-0")
    )  # what needs a look first


def test_on_a_terminal_it_looks_again_until_interrupted(out, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        record(out, "run-0", "finished", val_loss=3.25)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    assert main([str(out), "--every", "7"]) == 0 and looks == [7, 7, 7]
    text = capsys.readouterr().out
    assert "10 waiting" in text and "val_loss 3.2500" in text
    assert main([str(out), "--once"]) == 0 and len(looks) == 3


def test_a_folder_without_runs_exits_2(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert "holds no runs" in capsys.readouterr().err


def test_the_command_does_not_wait_for_torch(out):
    code = (
        "import sys, training.status as s; s.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "10 waiting" in done.stdout, done.stderr
