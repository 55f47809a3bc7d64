"""The run table: round trips, run directories, and one clear message for each kind of bad input."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from scaling.fits.fit import fit_joint
from scaling.runs import collect_runs, left_out, read_table, write_table


@pytest.fixture
def grid(make_grid, known_law):
    return make_grid(known_law, noise=0.003)


@pytest.fixture
def table(tmp_path, grid):
    """Write the grid with changed cells and return the path."""

    def build(name="runs.csv", frame=None, **changes):
        frame = (grid if frame is None else frame).copy()
        for column, (row, value) in changes.items():
            if column not in frame:
                frame[column] = None
            frame[column] = frame[column].astype(object)
            frame.loc[row - 1, column] = value
        path = tmp_path / name
        frame.to_csv(path, index=False)
        return path

    return build


@pytest.mark.parametrize("name", ["runs.csv", "runs.jsonl", "runs.parquet", "mit Lücke & ü.csv"])
def test_every_format_round_trips_bit_for_bit(tmp_path, grid, name):
    grid["val_loss"] = grid["val_loss"] + 1 / 3 * 1e-9
    grid["note"] = "größer"
    write_table(grid, tmp_path / name)
    back = read_table(tmp_path / name)
    pd.testing.assert_frame_equal(back, grid, check_dtype=False, check_exact=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]  # no temporary file left


def test_a_failed_write_keeps_the_old_table(tmp_path, grid, monkeypatch):
    path = tmp_path / "runs.csv"
    write_table(grid, path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_csv", fail)
    with pytest.raises(OSError, match="disk full"):
        write_table(grid.iloc[:1], path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["runs.csv"]


def test_run_directories_become_rows_in_a_stable_order(tmp_path):
    records = [
        {
            "run_id": "b",
            "budget_flops": 2e14,
            "recurrences": 1,
            "hidden_size": 64,
            "val_loss": None,
            "status": "failed",
        },
        {"run_id": "z", "budget_flops": 1e14, "recurrences": 4, "hidden_size": 64, "val_loss": 3.0},
        {
            "run_id": "a",
            "budget_flops": 1e14,
            "recurrences": 2,
            "hidden_size": 128,
            "val_loss": 3.1,
            "versions": {"x": 1},
        },
        {"run_id": "c", "budget_flops": 1e14, "recurrences": 2, "hidden_size": 64, "val_loss": 3.2},
    ]
    for record in records:
        (tmp_path / record["run_id"]).mkdir()
        (tmp_path / record["run_id"] / "run.json").write_text(json.dumps(record))
    (tmp_path / "c" / "evaluation.json").write_text(
        json.dumps({"loss/math": 1.5, "val_loss": 9.0, "tasks": {"a": 1}})
    )
    (tmp_path / "unfinished").mkdir()
    frame = collect_runs(tmp_path)
    assert frame["run_id"].tolist() == ["c", "a", "z", "b"]
    assert frame.loc[0, "loss/math"] == 1.5
    assert frame.loc[0, "val_loss"] == 3.2  # the run's own record wins
    assert "tasks" not in frame
    assert left_out(frame) == {"failed": 1}


def test_a_half_written_record_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text('{"run_id": "a", ')
    with pytest.raises(ValueError, match=r"a.run\.json: not JSON"):
        collect_runs(tmp_path)


def test_a_directory_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no \*/run\.json found"):
        read_table(tmp_path)


@pytest.mark.parametrize(
    "column", ["run_id", "recurrences", "n_once", "n_rec", "tokens", "val_loss"]
)
def test_a_missing_column_is_named(table, grid, column):
    with pytest.raises(ValueError, match=rf"runs\.csv: column {column} is missing"):
        read_table(table(frame=grid.drop(columns=column)))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("val_loss", float("nan"), r"val_loss is missing \(NaN\)"),
        ("val_loss", float("inf"), "val_loss is inf, but must be finite"),
        ("val_loss", -1.0, "val_loss is -1, but must be positive"),
        ("val_loss", 0.0, "val_loss is 0, but must be positive"),
        ("tokens", 0, "tokens is 0, but must be positive"),
        ("tokens", -5, "tokens is -5, but must be positive"),
        ("n_rec", -1, "n_rec is -1, but must be at least 0"),
        ("n_once", "many", "n_once is 'many', which is not a number"),
        ("recurrences", 0, "recurrences is 0, but must be positive"),
        ("recurrences", 1.5, "recurrences is 1.5, but must be a whole number"),
        ("budget_flops", -1e14, "budget_flops is -1e\\+14, but must be positive"),
        ("n_injection", 1e12, "n_injection is 1e\\+12, above n_rec"),
        ("status", "done", "status is 'done', but must be one of"),
        ("schema_version", 2, "schema_version is 2"),
    ],
)
def test_a_bad_value_is_named_with_file_row_run_and_remedy(table, column, value, message):
    with pytest.raises(
        ValueError, match=rf"runs\.csv, row 3 \(run C1e\+14-r1-d128-seed0\): {message}"
    ) as caught:
        read_table(table(**{column: (3, value)}))
    assert str(caught.value).rstrip(".").split(". ")[-1]  # ends with a remedy


def test_n_once_and_n_rec_both_zero_are_refused(table):
    with pytest.raises(ValueError, match=r"n_once \+ n_rec is 0"):
        read_table(table(n_once=(3, 0), n_rec=(3, 0), n_injection=(3, 0)))


def test_a_repeated_run_id_is_named_with_both_rows(table, grid):
    with pytest.raises(ValueError, match=r"row 5 .*run_id was already used in row 1"):
        read_table(table(run_id=(5, grid.loc[0, "run_id"])))


def test_the_same_run_under_two_names_is_refused(table, grid):
    frame = pd.concat([grid, grid.iloc[[4]].assign(run_id="copy")], ignore_index=True)
    with pytest.raises(
        ValueError, match=r"row 28 \(run copy\): the same run as row 5.*--drop copy"
    ):
        read_table(table(frame=frame))
    assert len(read_table(table(frame=frame), drop=["copy"])) == len(grid)


def test_seeds_with_equal_losses_are_not_duplicates(table, grid):
    frame = pd.concat([grid, grid.iloc[[4]].assign(run_id="other", seed=9)], ignore_index=True)
    assert len(read_table(table(frame=frame))) == len(grid) + 1


def test_a_loss_above_log_vocabulary_is_refused_and_bits_convert(table, grid):
    frame = grid.assign(vocab_size=32064)
    frame.loc[16, "val_loss"] = 2790.0
    with pytest.raises(
        ValueError,
        match=r"2.79e\+03 nats, above log\(vocab_size\) = 10.4.*--loss-unit bits.*--drop",
    ):
        read_table(table(frame=frame))
    bits = grid.assign(val_loss=grid["val_loss"] / math.log(2), **{"loss/math": 1.0})
    back = read_table(table(frame=bits), loss_unit="bits")
    np.testing.assert_allclose(back["val_loss"], grid["val_loss"], rtol=1e-15)
    np.testing.assert_allclose(back["loss/math"], math.log(2), rtol=1e-15)


def test_mixed_validation_sets_are_refused(table, grid):
    with pytest.raises(ValueError, match=r"row 2 .*val_fingerprint is b, but row 1 has a"):
        read_table(table(frame=grid.assign(val_fingerprint=["a"] + ["b"] * (len(grid) - 1))))


def test_only_finished_runs_need_numbers(table):
    frame = read_table(table(status=(3, "diverged"), val_loss=(3, float("nan"))))
    assert left_out(frame) == {"diverged": 1}


def test_no_finished_run_is_refused(table, grid):
    with pytest.raises(ValueError, match="none of its 27 runs is finished"):
        read_table(table(frame=grid.assign(status="running")))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("runs.csv", "", "the file is empty"),
        ("runs.csv", "run_id,recurrences,n_once,n_rec,tokens,val_loss\n", "the table has no rows"),
        ("runs.csv", 'a,b\n1,2\n3,4,5\n"', "cannot be read as csv"),
        ("runs.jsonl", '{"run_id": "a"}\nnot json\n', "line 2: not JSON"),
        ("runs.jsonl", "[1, 2]\n", "line 1: list, not an object"),
        ("runs.parquet", "text", "cannot be read as parquet"),
        ("runs.xlsx", "text", "extension '.xlsx' is not one of"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_table(path)
    assert name in str(caught.value)


def test_dropping_an_unknown_run_is_refused(table):
    with pytest.raises(ValueError, match="--drop names 'nobody'"):
        read_table(table(), drop=["nobody"])


def test_unknown_columns_pass_through(table, grid):
    assert read_table(table(frame=grid.assign(colour="blue")))["colour"].eq("blue").all()


def mixed(grid, **columns):
    """The grid with its looped runs once more, other seeds, and other values in `columns`."""
    other = grid[grid["recurrences"] > 1].copy()
    other["run_id"] = other["run_id"] + "-other"
    other["seed"] = 9
    other["val_loss"] -= 0.05
    base = grid.copy()
    for name, (old, new) in columns.items():
        base[name], other[name] = old, new
    return pd.concat([base, other], ignore_index=True)


@pytest.mark.parametrize("column", ["variant", "injection", "backprop_recurrences"])
def test_two_variants_at_one_r_are_refused_and_one_can_be_chosen(table, grid, column):
    values = {column: ("linear", "hyperconnections")} if column != "variant" else {}
    frame = mixed(grid, **({"variant": ("baseline", "hyperconnections")} | values))
    path = table(frame=frame)
    with pytest.raises(ValueError, match=r"r = [24] has runs of 2 variants .*--variant NAME"):
        read_table(path)
    chosen = read_table(path, variant="hyperconnections")
    looped = chosen[chosen["recurrences"] > 1]
    assert set(looped["variant"]) == {"hyperconnections"}
    assert (chosen["recurrences"] == 1).sum() == (grid["recurrences"] == 1).sum()  # r = 1 reused
    assert set(read_table(path, variant="baseline")["run_id"]) == set(grid["run_id"])
    with pytest.raises(ValueError, match="--variant is 'none'.*baseline, hyperconnections"):
        read_table(path, variant="none")


def test_runs_of_two_recipes_are_refused(table, grid):
    """Else a changed learning rate passes for the spread over seeds."""
    with pytest.raises(ValueError, match="trained with 2 recipes .*recipe_sha256.*--drop"):
        read_table(table(frame=mixed(grid, recipe_sha256=("a" * 64, "b" * 64))))
    frame = mixed(grid, recipe_sha256=("a" * 64, "a" * 64))
    assert len(read_table(table(frame=frame))) == len(frame)  # another seed of the same recipe


def test_losses_that_are_all_equal_are_refused(table, grid):
    with pytest.raises(ValueError, match=r"every run has the same loss, 2\.5 nats"):
        fit_joint(read_table(table(frame=grid.assign(val_loss=2.5, seed=range(len(grid))))))
