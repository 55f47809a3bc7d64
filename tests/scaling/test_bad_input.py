"""Tables that people really bring: each is read for what it is, or named for what is wrong with it."""

import decimal
import json
import os
import re

import numpy as np
import pandas as pd
import pytest

import scaling
from scaling.__main__ import main
from scaling.runs import read_table, write_table


@pytest.fixture(scope="module")
def grid(make_grid, known_law):
    frame = make_grid(known_law, noise=0.01)
    frame["budget_flops"] = frame["budget_flops"].astype(float)
    return frame


@pytest.fixture
def lines(grid):
    return grid.to_csv(index=False).splitlines()


def refused(path, capsys, *options):
    """Run the command line; it must end in one error line that names the file."""
    assert main(["fit", str(path), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [row.replace(",", ";") for row in rows], "columns are separated by semicolons"),
        (lambda rows: [row.replace(",", "\t") for row in rows], "columns are separated by tabs"),
        (lambda rows: [rows[0] + ",val_loss", *(row + ",3" for row in rows[1:])], "val_loss is there twice"),
        (lambda rows: [rows[0], *(row + ",3" for row in rows[1:])], "fields, but the header names"),
        (lambda rows: [*rows[:5], rows[5] + ",3", *rows[6:]], "cannot be read as csv"),
        (lambda rows: [*rows[:5], rows[5] + "\0", *rows[6:]], "holds NUL characters"),
        (lambda rows: [*rows[:5], rows[5].rsplit(",", 2)[0], *rows[6:]], "is missing \\(NaN\\)"),
        (lambda rows: rows[1:], "column run_id is missing"),
        (lambda rows: ["", ""], "cannot be read as csv"),
    ],
)  # fmt: skip
def test_csv_that_a_reader_would_guess_about_is_named(tmp_path, lines, change, message, capsys):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(change(lines)), encoding="utf-8")
    assert re.search(message, refused(path, capsys))


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_other_encodings_are_named(tmp_path, lines, encoding):
    path = tmp_path / "runs.csv"
    path.write_bytes("\n".join(lines).replace("seed0", "größe").encode(encoding))
    with pytest.raises(ValueError, match="not UTF-8"):
        read_table(path)


@pytest.mark.parametrize("name", ["runs.csv", "runs.jsonl"])
@pytest.mark.parametrize("folder", ["plain", "mit Lücke & 中文"])
def test_a_byte_order_mark_and_odd_folders_change_nothing(tmp_path, grid, name, folder):
    path = tmp_path / folder / name
    write_table(grid, path)
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig", newline="\r\n")
    pd.testing.assert_series_equal(read_table(path)["val_loss"], grid["val_loss"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"run_id": "a", "val_loss": 3, "val_loss": 2}', "val_loss is there twice"),
        ('{"run_id": "a", "val_loss"', "line 28: not JSON"),
    ],
)
def test_json_lines_that_a_reader_would_guess_about_are_named(tmp_path, grid, line, message):
    path = tmp_path / "runs.jsonl"
    write_table(grid, path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_table(path)


def test_a_parquet_file_cut_short_is_named(tmp_path, grid):
    path = tmp_path / "runs.parquet"
    write_table(grid, path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        read_table(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path, grid):
    path = tmp_path / "runs.csv"
    write_table(grid, path)
    path.chmod(0)
    with pytest.raises(ValueError, match="cannot be read as csv"):
        read_table(path)


@pytest.mark.parametrize(
    "convert",
    [
        lambda column: column.astype("string"),
        lambda column: column.astype(str).astype(object),
        lambda column: column.astype("category"),
        lambda column: column.astype("Float64"),
        lambda column: column.astype("double[pyarrow]"),
        lambda column: column.map(lambda value: decimal.Decimal(repr(value))),
    ],
    ids=["string", "object", "category", "nullable", "arrow", "decimal"],
)
def test_numbers_in_any_dtype_give_the_same_table(grid, convert):
    """Losses and tokens are read by value, whatever pandas keeps them in."""
    frame = grid.copy()
    for name in ("val_loss", "tokens", "budget_flops"):
        frame[name] = convert(frame[name])
    expected, found = scaling.RunTable.of(grid), scaling.RunTable.of(frame)
    for name in ("loss", "tokens", "budget_flops"):
        np.testing.assert_array_equal(found.runs[name], expected.runs[name])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("val_loss", True, "True, which is not a number"),
        ("val_loss", pd.Timestamp("2026-01-01"), "which is not a number"),
        ("val_loss", [3.0], r"\[3.0\], which is not a number"),
        ("val_loss", "3,1", "'3,1', which is not a number"),
        ("val_loss", 1e-300, "must be between 1e-06 and 1e\\+06 to be believed"),
        ("val_loss", 1e300, "must be between 1e-06 and 1e\\+06 to be believed"),
        ("tokens", 2**80, "must be at most 1e\\+18 to be believed"),
        ("n_rec", float("inf"), "must be finite"),
        ("recurrences", 1e300, "must be at most 1e\\+06 to be believed"),
        ("seed", "a", "'a', which is not a number"),
        ("seed", 0.5, "must be a whole number"),
    ],
)  # fmt: skip
def test_one_odd_value_among_good_ones_is_named(grid, column, value, message):
    frame = grid.copy()
    frame[column] = frame[column].astype(object)
    frame.at[4, column] = value
    with pytest.raises(ValueError, match=rf"row 5 \(run .*\): {column} is .*{message}"):
        scaling.RunTable.of(frame)


def test_columns_of_one_kind_are_looked_at_too(grid):
    for column in (grid["val_loss"] > 2, pd.to_datetime(grid["val_loss"], unit="s")):
        with pytest.raises(ValueError, match="row 1 .*which is not a number"):
            scaling.RunTable.of(grid.assign(val_loss=column))


def test_a_frame_with_two_columns_of_one_name_is_refused(grid):
    frame = pd.concat([grid, grid[["val_loss"]]], axis=1)
    with pytest.raises(ValueError, match="column val_loss is there twice"):
        scaling.RunTable.of(frame)


def test_the_index_of_a_frame_means_nothing(grid):
    frame = grid.copy()
    frame.index = pd.Index(["x"] * len(frame))
    pd.testing.assert_frame_equal(scaling.RunTable.of(frame).runs, scaling.RunTable.of(grid).runs)


@pytest.mark.parametrize("spread", [1e-15, 1e-4, 5e-3])
def test_budgets_that_differ_by_rounding_are_refused(grid, spread):
    """Else every run is a (budget, r) cell of its own and the interval comes out too short."""
    frame = grid.copy()
    frame["budget_flops"] *= 1 + spread * np.arange(len(frame)) / len(frame)
    if spread == 1e-15:
        frame["budget_flops"] = np.nextafter(grid["budget_flops"], np.inf)
        frame.loc[0, "budget_flops"] = grid.loc[0, "budget_flops"]
    with pytest.raises(ValueError, match="budget_flops is .* differ by less than 1%"):
        scaling.RunTable.of(frame)


def test_compute_that_contradicts_the_budget_is_warned_of(grid):
    frame = grid.copy()
    frame.loc[7, "tokens"] /= 1e3
    warnings = scaling.analyse(frame, resamples=20).warnings
    assert any("1 run spends more than 20% off budget" in text for text in warnings)
    assert not any("off budget" in text for text in scaling.analyse(grid, resamples=20).warnings)


def test_a_variant_of_a_table_without_recurrences_names_the_column(tmp_path, grid, capsys):
    path = tmp_path / "runs.csv"
    write_table(grid.drop(columns="recurrences").assign(variant="a"), path)
    assert "column recurrences is missing" in refused(path, capsys, "--variant", "a")


def test_the_unit_is_printed_and_kept(tmp_path, grid, capsys):
    path, out = tmp_path / "runs.csv", tmp_path / "fit.json"
    write_table(grid, path)
    assert main(["fit", str(path), "--json", str(out)]) == 0
    assert "column val_loss in nats per token\n" in capsys.readouterr().out
    assert json.loads(out.read_text())["loss_unit"] == "nats"
    write_table(grid.assign(val_loss=grid["val_loss"] / np.log(2)), path)
    assert main(["fit", str(path), "--loss-unit", "bits", "--json", str(out)]) == 0
    assert "in nats per token (converted from bits)\n" in capsys.readouterr().out
    assert json.loads(out.read_text())["loss_unit"] == "bits"


@pytest.mark.parametrize("command", ["fit", "report", "compare"])
def test_a_seed_that_is_none_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "runs.csv", "--seed", "-1"])
    assert "argument --seed: '-1' is not a whole number" in capsys.readouterr().err
