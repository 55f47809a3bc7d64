"""The command on run directories: what is scored, skipped, written, and ends in the run table."""

import json
import shutil

import pandas as pd
import pytest

from evaluation.command import main
from evaluation.names import tasks_named
from evaluation.prepare import prepare
from evaluation.results import axis_loss, with_losses, with_result
from evaluation.suite import AXES, CORE, TASKS

TASKS_HERE = ["svamp", "arc_easy"]


@pytest.fixture
def runs(tools, byte_tokenizer, tmp_path):
    """Two finished runs, one still running, one without its checkpoint."""
    for name, r, status in (
        ("a", 1, "finished"),
        ("b", 2, None),
        ("c", 4, "running"),
        ("d", 4, "finished"),
    ):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        record = {
            "run_id": name,
            "recurrences": r,
            "status": status,
            "val_loss": 3.0,
            "n_once": 1,
            "n_rec": 1,
            "tokens": 1,
        }
        (folder / "run.json").write_text(json.dumps(record))
        if name in "ab":
            tools.make_looped(recurrences=r).save_pretrained(folder / "checkpoint")
            byte_tokenizer.save_pretrained(folder / "checkpoint")
    return tmp_path / "runs"


def command(runs, data, *options):
    return main(
        ["--runs", str(runs), "--data", str(data), "--tasks", *TASKS_HERE, "--limit", "8", *options]
    )


@pytest.mark.filterwarnings("ignore")
def test_finished_runs_are_scored_once_and_fill_the_run_table(runs, data, capsys):
    assert command(runs, data) == 0
    text = capsys.readouterr().out
    assert "skipped c: its status is running" in text and "skipped d: it has no checkpoint" in text
    assert "0 of 2 finished runs were scored before, 2 to do" in text
    table = pd.read_csv(runs / "runs.csv").set_index("run_id")
    for name, r in (("a", 1), ("b", 2)):
        found = json.loads((runs / name / "evaluation.json").read_text())
        own = found["evaluations"][f"checkpoint, r = {r}"]
        for task in TASKS_HERE:
            assert own[task]["documents"] == 8 and own[task]["partial"]
            assert own[task]["num_recurrences"] == r
            assert table.loc[name, f"loss/{task}"] == found[f"loss/{task}"] == own[task]["loss"]
    assert "loss/looped_math" not in table  # two of its tasks are missing
    assert table.loc["c"].isna()["loss/svamp"]
    before = (runs / "a" / "evaluation.json").read_bytes()
    assert command(runs, data) == 0
    assert "2 of 2 finished runs were scored before, 0 to do" in capsys.readouterr().out
    assert (runs / "a" / "evaluation.json").read_bytes() == before


@pytest.mark.filterwarnings("ignore")
def test_other_recurrences_stand_beside_the_runs_own_and_stay_out_of_the_table(runs, data, capsys):
    shutil.rmtree(runs / "b")
    assert command(runs, data) == 0
    own = json.loads((runs / "a" / "evaluation.json").read_text())
    assert command(runs, data, "--num-recurrences", "3") == 0
    found = json.loads((runs / "a" / "evaluation.json").read_text())
    assert set(found["evaluations"]) == {"checkpoint, r = 1", "checkpoint, r = 3"}
    assert found["loss/svamp"] == own["loss/svamp"]
    assert command(runs, data, "--incomplete") == 0
    assert "0 to do" in capsys.readouterr().out
    found = json.loads((runs / "a" / "evaluation.json").read_text())
    assert found["loss/looped_math"] == found["loss/svamp"]  # asked for: one task of three


@pytest.mark.filterwarnings("ignore")
def test_changed_rows_are_scored_again(runs, data, tools, tmp_path, capsys):
    shutil.rmtree(runs / "b")
    assert command(runs, data) == 0
    source, other = tmp_path / "source", tmp_path / "other"
    source.mkdir()
    for task in TASKS_HERE:
        tools.write_rows(source, task, tools.make_rows(task, seed=5))
    prepare(other, TASKS_HERE, source=source, partial=True)
    capsys.readouterr()
    assert command(runs, other) == 0
    assert "1 to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "looped_maths"], "There is no task 'looped_maths'. Near: looped_math"),
        (["--tasks", "webq"], "webq.jsonl is missing (1 of 1 tasks are). Write it with `python -m"),
        (["--tasks", "svamp", "--limit", "0"], "--limit is 0, but must be at least 1"),
        (["--tasks", "svamp", "--batch-size", "-2"], "--batch-size is -2"),
    ],
)
def test_bad_options_end_in_one_line(runs, data, capsys, options, message):
    assert main(["--runs", str(runs), "--data", str(data), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_rows_that_prepare_has_not_checked_are_refused(runs, tools, tmp_path, capsys):
    tools.write_rows(tmp_path, "svamp", tools.make_rows("svamp"))
    assert main(["--runs", str(runs), "--data", str(tmp_path), "--tasks", "svamp"]) == 2
    assert "was not written by `python -m evaluation prepare`" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_of_results_is_named(runs, data, capsys):
    (runs / "a" / "evaluation.json").write_text("{")
    assert command(runs, data) == 2
    assert "evaluation.json: not JSON" in capsys.readouterr().err


def test_a_folder_without_runs_is_named(tmp_path, data, capsys):
    assert command(tmp_path, data) == 2
    assert "no */run.json found" in capsys.readouterr().err


def test_names_of_tasks_and_groups():
    assert tasks_named(["looped_core"]) == list(CORE)
    assert tasks_named(["math,svamp", "looped_extra"]) == [
        "svamp", "asdiv", "mawps", "bigbench_cs_algorithms", "induction_head",
    ]  # fmt: skip
    assert tasks_named(["looped_core", "extra"]) == list(TASKS)


def test_an_axis_has_a_loss_only_with_all_its_tasks():
    results = {}
    for number, task in enumerate(AXES["looped_math"]):
        assert "loss/looped_math" not in with_losses(results, "m")
        results = with_result(results, "m", task, {"loss": float(number)})
    found = with_losses(results, "m")
    assert found["loss/looped_math"] == 1.0
    assert axis_loss({"svamp": {"loss": 2.0}}, AXES["looped_math"], incomplete=True) == 2.0
    assert axis_loss({}, AXES["looped_math"], incomplete=True) is None
