"""`design` from its options to its text and JSON: defaults, tables, Δφ and bad input."""

import argparse
import json

import pytest

from scaling.fits.fit import fit_joint
from scaling.planning.cheapest import COSTS
from scaling.planning.design import PAPER_GRID, PAPER_LAW, grid_of
from scaling.planning.guess import guess_of
from scaling.planning.noise import Noise
from scaling.planning.plan import add_arguments, run
from scaling.planning.plan_report import plan_json, render_plan
from scaling.planning.planned import Plan, plan
from scaling.runs.table import RunTable


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(one) for one in arguments])


SMALL = ("--budgets", "4.64e17", "1e18", "2.15e18", "--recurrences", "1", "2", "4", "8")


@pytest.fixture(scope="module")
def small():
    """Three budgets × four r, found with very few sets."""
    return plan(guess_of(options(*SMALL)), targets=(0.3,), n_sets=3)


@pytest.mark.parametrize("arguments", [(), ("--paper",)])
def test_without_options_the_guess_is_the_papers(arguments):
    guess = guess_of(options(*arguments))
    assert (guess.law, guess.noise, guess.grid) == (PAPER_LAW, Noise(), PAPER_GRID)
    assert [one.r for one in guess.family] == [1, 2, 4, 8]


def test_options_replace_their_part_of_the_guess():
    guess = guess_of(
        options(
            *SMALL,
            "--phi",
            0.8,
            "--noise-run",
            0.02,
            "--widths",
            "384,512,640",
            "--vocab-size",
            50000,
        )
    )
    assert guess.law.phi == 0.8 and guess.law.alpha == PAPER_LAW.alpha
    assert guess.noise == Noise(run=0.02, cell=0.005)
    assert guess.grid.budgets == (4.64e17, 1e18, 2.15e18)
    assert guess.grid.widths == ((384, 512, 640),) * 3
    # 6 · (50,000 − 32,064) · d more FLOPs per token
    more = guess.family[0].at(512.0)[0] - guess_of(options()).family[0].at(512.0)[0]
    assert more == pytest.approx(6 * (50_000 - 32_064) * 512, rel=1e-6)
    law = options("--law", 1, 20, 0.3, 500, 0.4, 0.7)
    assert tuple(vars(guess_of(law).law).values()) == (1.0, 20.0, 0.3, 500.0, 0.4, 0.7)


def test_a_table_gives_grid_counts_law_and_noise(paper, paper_path):
    guess = guess_of(options("--like", paper_path, "--split", "regression"))
    fit = fit_joint(RunTable.of(paper, split="regression"))
    assert guess.law == fit.law
    assert guess.noise == Noise.of(fit)
    assert guess.grid == grid_of(fit.runs) == PAPER_GRID


def test_the_search_is_for_the_grids_own_width_and_twice_it():
    found = plan(guess_of(options(*SMALL)), n_sets=2)
    own = found.forecast.width
    assert [one.target for one in found.choices] == [own, own, 2 * own, 2 * own]
    assert [one.minimised for one in found.choices] == [*COSTS, *COSTS]
    assert found.flops == found.grid.flops == pytest.approx(20 * (4.64e17 + 1e18 + 2.15e18))


def test_a_difference_is_planned_for_both_sweeps():
    found = plan(guess_of(options(*SMALL)), delta_phi=0.2, targets=(0.5,), n_sets=2)
    assert (found.forecast.of, found.forecast.truth) == ("delta_phi", 0.2)
    assert found.n_runs == 60 + 45  # 15 widths for r = 1, 2, 4, 8 and again for 2, 4, 8
    text = render_plan(found)
    assert "would tell about Δφ" in text and "Δφ = +0.2" in text
    assert "their r = 1 runs once" in text


def test_the_text_holds_what_the_plan_found(small):
    text = render_plan(small)
    own = next(line for line in text.splitlines() if line.startswith("| the grid given"))
    assert f"{small.forecast.width:.3f}" in own and f"{small.flops:.3g}" in own
    for one in small.choices:
        row = next(line for line in text.splitlines() if line.startswith("| 0.300 wide"))
        assert f"{one.forecast.width:.3f}" in row or one.minimised == "runs"
    assert "0.459" in text and "0.009 nats" in text
    assert "does not drift with scale" in text
    assert "published" not in text and "[0.41, 0.53]" not in text  # another grid than the paper's


def test_the_papers_grid_stands_beside_its_published_interval(small):
    papers = Plan(**{**vars(small), "grid": PAPER_GRID, "choices": ()})
    assert "The paper publishes [0.41, 0.53], 0.12 wide" in render_plan(papers)


def test_a_width_out_of_reach_keeps_its_reason():
    found = plan(guess_of(options(*SMALL)), targets=(0.001,), minimise=("runs",), n_sets=2)
    assert found.choices[0].reason in " ".join(render_plan(found).split())
    assert plan_json(found)["choices"][0]["grid"] is None


def test_a_plan_survives_json(small):
    assert Plan.from_json(small.to_json()) == small
    value = json.loads(json.dumps(plan_json(small), allow_nan=False))
    assert value["expected_width"] == small.forecast.width
    assert value["n_runs"] == small.grid.n_runs


def test_run_prints_the_text_writes_json_and_speaks_on_stderr(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert (
        run(options(*SMALL, "--target", 0.3, "--minimise", "runs", "--sets", 20, "--json", out))
        == 0
    )
    shown = capsys.readouterr()
    assert shown.out.startswith("# What the grid given would tell about φ\n")
    assert "simulating the grid: 60 runs" in shown.err and "took " in shown.err
    value = json.loads(out.read_text(encoding="utf-8"))
    assert [one["minimised"] for one in value["choices"]] == ["runs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budgets", "-1", "1e18"), "--budgets has '-1', but takes positive numbers"),
        (("--budgets", "many", "1e18"), "--budgets has 'many'"),
        (("--budgets", "1e18", "1e17"), r"--budgets has 1e17 after 1e\+18, .* ascending"),
        (("--budgets", "1e18"), r"--budgets is 1e\+18 alone"),
        (("--budgets", "1", "2"), r"budgets \(--budgets\): at 1 FLOPs the law has no best width"),
        (("--widths", "384", "512"), "--widths has 2 lists for 6 budgets"),
        (("--widths", "384,wide"), "--widths has 'wide'"),
        (("--recurrences", "4"), "--recurrences names r = 4 alone"),
        (("--recurrences", "1", "3"), r"recurrences \(--recurrences\): 3 does not divide"),
        (("--recurrences", "1", "2.5"), "--recurrences has 2.5, which is no whole number"),
        (("--target", "0"), "--target is 0, but an interval's width is positive"),
        (("--target", "nan"), "--target is nan"),
        (("--sets", "5"), "--sets is 5, but percentiles"),
        (("--seed", "-1"), "--seed is -1"),
        (("--phi", "7"), "--phi is 7, but φ must lie between"),
        (("--delta-phi", "9"), r"--delta-phi is 9, φ \+ Δφ 9.459"),
        (("--delta-phi", "nan"), "--delta-phi is nan"),
        (("--law", "1", "2", "3", "4", "5", "x"), "--law is 1 2 3 4 5 x: could not convert"),
        (("--law", "1", "-2", "3", "4", "5", "0.5"), "--law is 1 -2 3 4 5 0.5: JointLaw: A is -2"),
        (("--noise-run", "-1"), "--noise-run is -1"),
        (("--noise-run", "0", "--noise-cell", "0"), "--noise-run, --noise-cell.* are both 0"),
        (("--effective-depth", "3"), "--effective-depth.* is 3, below shared_depth"),
        (("--paper", "--phi", "0.5", "--budgets", "1e18"), "--paper and --budgets exclude each"),
        (("--like", "nowhere.csv"), "nowhere.csv: there is no such file"),
        (("--like", "x.csv", "--shared-depth", "8"), "--like and --shared-depth exclude each"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_the_options_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(options(*arguments))


def test_a_table_without_the_wanted_r_is_refused(paper_path):
    with pytest.raises(ValueError, match=r"no counts for r = 16: the table has runs of r = 1, 2"):
        guess_of(options("--like", paper_path, "--recurrences", 1, 16))
