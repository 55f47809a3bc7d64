"""What the report and its JSON say, and that they warn where they should."""

import json

import numpy as np
import pytest

import scaling
from scaling.reports.analysis import as_json
from scaling.reports.plots import frontier_figure
from scaling.reports.report import render
from scaling.runs.seeds import gaps_between_r, seed_spread


@pytest.fixture(scope="module")
def noisy(make_grid, known_law):
    """Two budgets, three widths, three r, three seeds, with seed noise as large as the gaps."""
    return scaling.analyse(make_grid(known_law, budgets=(1e14, 4e14), seeds=3, noise=0.05))


def test_the_report_of_the_paper_runs_holds_its_numbers(paper_analysis):
    text = render(paper_analysis)
    low, high = paper_analysis.phi_ci
    assert f"φ = 0.4586, 95 % interval [{low:.3f}, {high:.3f}] (200 resamples of 24" in text
    assert "1.89 × at r = 4" in text  # 4^0.4586
    assert "Split:  regression" in text
    assert "116 finished, 0 left out" in text
    for number in ("0.9972", "0.9858", "0.9552", "2.85229", "67.77 M"):
        assert number in text
    assert "Warnings" not in text


def test_the_json_is_strict_and_agrees_with_the_fit(paper_analysis):
    value = json.loads(json.dumps(as_json(paper_analysis), allow_nan=False))
    for name in ("phi", "alpha", "beta", "E", "A", "B"):
        assert value[name] == getattr(paper_analysis.fit.law, name)
    assert value["phi_ci"] == list(paper_analysis.phi_ci)
    assert value["r2"] == paper_analysis.fit.r2 and value["rmse"] == paper_analysis.fit.rmse
    assert value["split"] == "regression" and value["n_runs"] == 116
    assert value["restricted"]["phi=1"]["phi"] == 1.0
    assert len(value["isoflops"]) == len(value["frontier"]) == 24
    assert [row["r"] for row in value["residuals"]] == [1, 2, 4, 8]


def test_pooled_seed_spread_equals_a_plain_loop(noisy):
    squares, dof = 0.0, 0
    for _, group in noisy.fit.runs.groupby(["budget_flops", "r", "hidden_size"]):
        squares += float(np.sum((group["loss"] - group["loss"].mean()) ** 2))
        dof += len(group) - 1
    assert noisy.seeds.dof == dof == 36
    assert noisy.seeds.n_settings == 18
    assert noisy.seeds.sd == pytest.approx(np.sqrt(squares / dof), rel=1e-12)


def test_gaps_compare_neighbouring_r_at_their_best_width(noisy):
    gaps = gaps_between_r(noisy.fit.runs)
    assert [(g.budget_flops, g.r_low, g.r_high) for g in gaps] == [
        (b, a, c) for b in (1e14, 4e14) for a, c in ((1, 2), (2, 4))
    ]
    runs = noisy.fit.runs
    best = {
        r: runs[(runs["budget_flops"] == 1e14) & (runs["r"] == r)]
        .groupby("hidden_size")["loss"]
        .mean()
        .min()
        for r in (1, 2)
    }
    assert gaps[0].gap == pytest.approx(best[2] - best[1], rel=1e-12)


def test_one_seed_has_no_spread(paper_analysis):
    assert seed_spread(paper_analysis.fit.runs) is None
    assert "Seeds against r" not in render(paper_analysis)


def test_a_noisy_little_grid_is_reported_with_warnings(noisy):
    text = " ".join(render(noisy).split())
    assert "Seeds against r" in text and "36 degrees of freedom" in text
    assert "6 (budget, r) cells" in text
    assert any("few blocks" in warning for warning in noisy.warnings)


def test_an_interval_that_covers_zero_or_one_is_said(noisy):
    low, high = noisy.phi_ci
    assert any("covers 0" in text for text in noisy.warnings) == (low <= 0 <= high)
    assert any("covers 1" in text for text in noisy.warnings) == (low <= 1 <= high)
    assert any("wide" in text for text in noisy.warnings) == (high - low > 0.3)


def test_a_restricted_fit_that_the_design_cannot_take_becomes_a_warning(make_grid, known_law):
    """At φ = 1 iso-FLOPs architectures coincide: two widths at two budgets are four points."""
    grid = make_grid(known_law, budgets=(1e14, 4e14), widths=(64, 128), noise=0.002)
    analysis = scaling.analyse(grid, resamples=10)
    assert list(analysis.restricted) == [0]
    assert any("no fit with φ = 1" in text for text in analysis.warnings)
    assert "| φ = 0" in render(analysis) and "| φ = 1" not in render(analysis)
    labels = [text.get_text() for text in frontier_figure(analysis).legends[0].get_texts()]
    assert "same law, φ = 1" in labels


def test_left_out_runs_stand_in_the_report(make_grid, known_law):
    grid = make_grid(known_law, noise=0.005)
    grid["status"] = ["diverged", "failed"] + ["finished"] * (len(grid) - 2)
    text = render(scaling.analyse(grid, resamples=10))
    assert "25 finished, 2 left out (1 diverged, 1 failed)" in text


def test_write_outputs_writes_report_numbers_and_figures(tmp_path, make_grid, known_law):
    analysis = scaling.write_outputs(
        make_grid(known_law, budgets=(1e14, 4e14), rs=(1, 4), noise=0.005), tmp_path / "out"
    )
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["fit.json", "frontier.png", "isoflops.png", "predicted.png", "report.txt"]
    assert json.loads((tmp_path / "out" / "fit.json").read_text())["phi"] == analysis.phi
    for name in ("frontier.png", "isoflops.png", "predicted.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_nothing_is_written_for_a_table_that_cannot_be_fitted(tmp_path, make_grid, known_law):
    with pytest.raises(ValueError, match="two different r"):
        scaling.write_outputs(make_grid(known_law, rs=(1,)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
