"""The command line through a subprocess: what it prints, exit codes, JSON keys, no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import scaling

ROOT = Path(__file__).parents[2]


def run(*arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "PYTHONIOENCODING": "utf-8",
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        cwd=ROOT,
    )


def test_fit_prints_phi_and_writes_json_report_and_plots(tmp_path, paper_path):
    done = run(
        "-m", "scaling", "fit", paper_path, "--split", "regression",
        "--json", tmp_path / "fit.json", "--plots", tmp_path / "plots",
        "--report", tmp_path / "report.txt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "φ = 0.4586, 95 % interval [0.41" in done.stdout
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == done.stdout
    value = json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))
    assert {
        "phi",
        "phi_ci",
        "alpha",
        "beta",
        "E",
        "A",
        "B",
        "r2",
        "rmse",
        "split",
        "n_runs",
    } <= set(value)
    assert value["phi"] == pytest.approx(0.4585, abs=5e-4)
    assert len(value["phi_ci"]) == 2
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "frontier.png",
        "isoflops.png",
        "predicted.png",
    ]


def test_errors_are_one_message_on_stderr_and_exit_code_two(tmp_path, make_grid, known_law):
    path = tmp_path / "runs.csv"
    make_grid(known_law, rs=(2,)).to_csv(path, index=False)
    done = run("-m", "scaling", "fit", path, "--json", tmp_path / "fit.json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {path}: all runs have recurrences = 2")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "fit.json").exists()


def test_drop_loss_unit_and_loss_column_reach_the_fit(tmp_path, make_grid, known_law):
    grid = make_grid(known_law, noise=0.002)
    grid["loss/math"] = grid["val_loss"] / 0.6931471805599453
    grid.loc[0, "loss/math"] = -1.0
    path = tmp_path / "runs.jsonl"
    grid.to_json(path, orient="records", lines=True)
    done = run(
        "-m", "scaling", "fit", path, "--loss", "loss/math", "--loss-unit", "bits",
        "--drop", grid.loc[0, "run_id"],
        "--json", tmp_path / "fit.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    value = json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))
    assert value["n_runs"] == len(grid) - 1
    assert value["loss"] == "loss/math"
    assert value["E"] < 2.2  # nats again: the law behind has 1.6


def test_check_says_what_is_missing_for_which_fit(tmp_path, make_grid, known_law):
    path = tmp_path / "runs.csv"
    make_grid(known_law).drop(
        columns=["n_injection", "train_flops_per_token", "shared_depth"]
    ).to_csv(path, index=False)
    done = run("-m", "scaling", "check", path)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "ready    joint law, --split text" in text
    assert "missing  joint law, --split once" in text and "n_injection" in text
    assert "missing  joint law, --split regression" in text and "shared_depth" in text
    assert "ready    interval of φ" in text
    assert "missing  frontier: column train_flops_per_token" in text


def test_a_directory_of_run_directories_is_read(tmp_path, make_grid, known_law):
    for record in make_grid(known_law, noise=0.003).to_dict("records"):
        (tmp_path / record["run_id"]).mkdir()
        (tmp_path / record["run_id"] / "run.json").write_text(json.dumps(record))
    done = run("-m", "scaling", "check", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "27 finished runs; left out: none" in done.stdout


def test_scaling_imports_neither_torch_nor_the_other_packages():
    code = (
        "import sys, scaling, scaling.__main__\n"
        "assert 'matplotlib' not in sys.modules\n"  # fits work without it
        "import scaling.reports.plots\n"
        "bad = {'torch', 'transformers', 'hf_looped', 'training', 'evaluation', 'model_cards'}\n"
        "bad.add('matplotlib.pyplot')  # global state\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    done = run("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_compare_writes_the_promised_keys(tmp_path, paper_path):
    frame = scaling.read_table(paper_path)
    looped = frame[frame["recurrences"] > 1]
    scaling.write_table(looped, tmp_path / "variant.csv")
    done = run(
        "-m", "scaling", "compare", paper_path, tmp_path / "variant.csv",
        "--split", "regression", "--json", tmp_path / "delta.json",
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    value = json.loads((tmp_path / "delta.json").read_text(encoding="utf-8"))
    assert list(value)[:6] == [
        "delta_phi", "delta_phi_ci", "phi_baseline", "phi_variant", "p_positive", "verdict",
    ]  # fmt: skip
    assert abs(value["delta_phi"]) < 1e-9  # the same runs, r = 1 reused
    assert value["verdict"].startswith("Cannot tell")


def test_chinchilla_ignores_the_recurrences(tmp_path, known_law, make_grid):
    """On noise-free losses of an unlooped law the fit is that law, whatever r the table names."""
    frame = make_grid(known_law, rs=(1, 2))
    n = frame["n_once"] + frame["n_rec"]
    frame["val_loss"] = 1.6 + 30.0 * n**-0.2 + 900.0 * frame["tokens"] ** -0.37
    scaling.write_table(frame, tmp_path / "runs.csv")
    done = run(
        "-m", "scaling", "fit", tmp_path / "runs.csv", "--law", "chinchilla",
        "--json", tmp_path / "fit.json", "--delta", "1e-2",
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    value = json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))
    found = [value[name] for name in ("E", "A", "alpha", "B", "beta")]
    assert found == pytest.approx([1.6, 30.0, 0.2, 900.0, 0.37], rel=1e-4)  # flat minimum
    assert {"objective", "n_at_best", "condition", "at_bound"} <= set(value)
    assert value["delta"] == 1e-2


def test_a_noisy_axis_gives_null_with_the_reason_and_status_0(tmp_path, known_law, make_grid):
    frame = make_grid(known_law, noise=0.01)
    noise = np.random.default_rng(3).normal(size=len(frame))
    frame["loss/noise"] = 2.0 + 0.3 * np.abs(noise)
    scaling.write_table(frame, tmp_path / "runs.csv")
    done = run(
        "-m", "scaling", "fit", tmp_path / "runs.csv", "--loss", "loss/noise",
        "--json", tmp_path / "fit.json",
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    value = json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))
    assert value["phi"] is None and value["reason"]
    assert value["reason"].split(";")[0][:20] in done.stdout.replace("\n  ", " ")


def test_report_refuses_an_unknown_format_before_any_work(tmp_path, paper_path):
    done = run("-m", "scaling", "report", paper_path, "--out", tmp_path / "report.pdf")
    assert done.returncode == 2 and "report.pdf" in done.stderr and ".html" in done.stderr


def test_figures_come_as_svg(tmp_path, paper_path):
    done = run(
        "-m", "scaling", "fit", paper_path, "--plots", tmp_path, "--plot-format", "svg"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("isoflops", "frontier", "predicted"):
        assert "<svg" in (tmp_path / f"{name}.svg").read_text(encoding="utf-8")


def test_saturation_recovers_a_known_curve(tmp_path):
    T = np.array([1, 2, 4, 8, 12])
    rows = [
        {"run_id": f"run{k}", "recurrences": 4, "test_recurrences": t,
         "loss": 2.5 + 0.1 * k + 1.2 * np.exp(-2.0 * t / 4)}
        for k in range(3) for t in T
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "points.csv", index=False)
    done = run(
        "-m",
        "scaling",
        "depth",
        tmp_path / "points.csv",
        "--json",
        tmp_path / "s.json",
        "--plot",
        tmp_path / "s.svg",
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    value = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert (value["Z"], value["z"]) == pytest.approx((1.2, 2.0), rel=1e-5)
    assert "<svg" in (tmp_path / "s.svg").read_text(encoding="utf-8")
    done = run("-m", "scaling", "depth", tmp_path / "points.csv", "--plot", tmp_path / "s.gif")
    assert done.returncode == 2 and "give a .png or .svg file" in done.stderr


def test_design_says_what_a_grid_costs(tmp_path):
    done = run(
        "-m", "scaling", "design", "--budgets", "1e18", "4e18", "1.6e19", "6.4e19",
        "--recurrences", "1", "2", "4", "--sets", "20", "--target", "0.5",
        "--minimise", "runs", "--json", tmp_path / "design.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    value = json.loads((tmp_path / "design.json").read_text(encoding="utf-8"))
    flops = 3 * 5 * (1e18 + 4e18 + 1.6e19 + 6.4e19)  # five widths a budget, each with three r
    assert f"{flops:.3g}" in done.stdout
    assert value
