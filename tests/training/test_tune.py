"""The check of a base learning rate: which runs it plans, what it reads from their records, and what it refuses."""

import io
import json
import math
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

import training
from training import sweep, tune
from training.config import load_config, save_config
from training.curves import Condition, fit
from training.hyperp import learning_rates
from training.loop import train
from training.record import architecture_of, describe
from training.tune import main, read_runs, star
from training.tune_plot import sweep_figure

ROOT = Path(training.__file__).parents[1]
TINY = ("--widths=24", "--horizons=0.04", "--recurrences=2", "--factors=0.5,1,2")
FEW = ("--widths=48,64", "--horizons=10,20", "--recurrences=1,4")  # of nano: six curves


def call(*arguments):
    stream = io.StringIO()
    with redirect_stderr(stream), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        status = main([str(argument) for argument in arguments])
    return status, stream.getvalue()


def planned(*arguments):
    return star(tune._parser().parse_intermixed_args([str(a) for a in arguments]), "muonh_lr")


@pytest.fixture(scope="module")
def recipe_file(recipe_fields, tmp_path_factory):
    """The tiny recipe with a reference horizon of 0.02 tokens per parameter, a few steps."""
    fields = OmegaConf.to_container(OmegaConf.create(recipe_fields | {"steps": 1}))
    fields["transfer"]["tokens_per_parameter"] = 0.02
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    OmegaConf.save(OmegaConf.create(fields), path)
    return path


def condition_of(config):
    tokens = config.steps * config.batch_tokens
    return config.model.recurrences, config.model.hidden_size, tokens


def test_the_plan_is_a_star_of_widths_and_horizons_for_every_r():
    """The paper's conditions (appendix E.2): s = 8, 10, 14 at 10 tokens per parameter, s = 10 at 10, 20, 40.

    Executed parameters by hand: 20 blocks of 12·d² + 2·d, and for r = 4 four injections of 2·d².
    """
    runs = planned(
        "--recipe=paper", "--out=x", "--widths=512,640,896", "--horizons=10,20,40", "--factors=0.7,1,1.4",
        "data.tokenizer=null", "data.vocab_size=32000",
    )  # fmt: skip

    def tokens(r, d, horizon):
        executed = 20 * (12 * d**2 + 2 * d) + (r == 4) * 4 * 2 * d**2
        return round(horizon * executed / 2**18) * 2**18

    arms = [(512, 10), (640, 10), (896, 10), (640, 20), (640, 40)]
    expected = {(r, d, tokens(r, d, h)) for r in (1, 4) for d, h in arms}
    assert {condition_of(run) for run in runs} == expected
    assert len(runs) == 10 * 3
    assert len({run.name for run in runs}) == len(runs)
    base = load_config(tune.RECIPES / "paper.yaml")
    for run in runs:
        factor = float(run.name.split("-x")[1].split("-")[0])
        assert run.optimizer == replace(base.optimizer, muonh_lr=factor * 0.014)
        assert (run.transfer, run.batch_tokens) == (base.transfer, base.batch_tokens)


def test_without_lists_the_plan_comes_from_the_recipes_reference_point():
    runs = planned("--recipe=nano", "--out=x")
    widths = {run.model.hidden_size for run in runs}
    assert widths == {48, 64, 96}  # 0.8, 1, 1.4 of 64 in whole heads of 16
    assert {run.model.recurrences for run in runs} == {1, 4}
    executed = 6 * (12 * 64**2 + 2 * 64)
    horizons = {round(h * executed / 1024) * 1024 for h in (5, 10, 20)}
    found = {condition_of(run)[2] for run in runs if condition_of(run)[:2] == (1, 64)}
    assert found == horizons
    assert sorted({run.optimizer.muonh_lr for run in runs}) == pytest.approx(
        [0.01, 0.014, 0.02, 0.028, 0.04], rel=1e-12
    )
    assert {run.optimizer.embedding_lr for run in runs} == {0.34} and len(runs) == 10 * 5


def test_an_override_moves_the_base_and_any_rate_can_be_swept(recipe_file):
    arguments = ["--recipe", recipe_file, "--out", "x", *TINY, "--seeds=0,3"]
    moved = planned(*arguments, "optimizer.muonh_lr=0.05")
    assert {run.optimizer.muonh_lr for run in moved} == {0.025, 0.05, 0.1}
    assert {run.seed for run in moved} == {0, 3} and len(moved) == 2 * 3 * 2
    options = tune._parser().parse_intermixed_args([str(a) for a in arguments])
    embedding = star(options, "embedding_lr")
    assert {run.optimizer.embedding_lr for run in embedding} == {0.15, 0.3, 0.6}
    assert {run.optimizer.muonh_lr for run in embedding} == {0.03}
    # The sweep is in base rates: what trains is the factor times the rate that the recipe gives at that condition.
    for run in moved:
        factor = run.optimizer.muonh_lr / 0.05
        rates = [
            learning_rates(o, run.transfer, run.model, run.batch_tokens, run.steps * 128)["matrix"]
            for o in (run.optimizer, replace(run.optimizer, muonh_lr=0.05))
        ]
        assert rates[0] == pytest.approx(factor * rates[1], rel=1e-12)


def in_process(runs, jobs, console):
    """Stand in for the pool of worker processes, which takes seconds to start; `test_sweep` has the real one."""
    return {run.config.name: train(run.config)["status"] for run in runs}


@pytest.fixture(scope="module")
def swept(recipe_file, tmp_path_factory):
    """Plan alone; sweep; and once more, when nothing may be trained."""
    out = tmp_path_factory.mktemp("tune") / "runs"
    arguments = ["--recipe", recipe_file, "--out", out, *TINY, "--jobs=1"]
    dry = call(*arguments, "--dry-run")
    assert not out.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "run_here", in_process)
        first = call(*arguments)
        written = (out / "tune.json").read_bytes(), (out / "tune.csv").read_bytes()
        patch.setattr(sweep, "run_here", lambda runs, *_: {} if not runs else pytest.fail("again"))
        second = call(*arguments)
    assert written == ((out / "tune.json").read_bytes(), (out / "tune.csv").read_bytes())
    return out, dry, first, second


def test_a_dry_run_shows_every_run_and_its_cost(swept):
    _, (status, text), *_ = swept
    assert status == 0 and "6 runs" in text and "FLOPs" in text
    for width, horizon in ((24, 0.02), (16, 0.04)):
        for factor in ("0.5", "1", "2"):
            assert f" muonh_lr-r2-d{width}-h{horizon}-x{factor}-seed0 " in text


def test_the_table_of_runs_is_what_their_records_say(swept):
    out, _, (status, text), _ = swept
    assert status == 0 and "6 of 6 runs finished" in text
    table = pd.read_csv(out / "tune.csv").set_index("run_id")
    assert len(table) == 6 and (table["status"] == "finished").all()
    for name, row in table.iterrows():
        record = json.loads((out / name / "run.json").read_text())
        config = load_config(out / name / "config.yaml")
        for column in ("val_loss", "tokens", "steps", "hidden_size", "recurrences", "seed"):
            assert row[column] == record[column]
        assert row["base_rate"] == config.optimizer.muonh_lr
        assert row["base"] == pytest.approx(0.03, rel=1e-12)


def test_the_curves_are_fits_of_those_losses_and_the_verdict_is_said(swept):
    out, _, (_, text), _ = swept
    table, result = pd.read_csv(out / "tune.csv"), json.loads((out / "tune.json").read_text())
    assert result["field"] == "optimizer.muonh_lr" and result["verdict"] in text
    assert result["base"] == pytest.approx(0.03, rel=1e-12)
    places = [
        (c["recurrences"], c["hidden_size"], c["tokens_per_parameter"])
        for c in result["conditions"]
    ]
    assert places == [(2, 16, 0.04), (2, 24, 0.02)]
    for found in result["conditions"]:
        cell = table[
            (table["hidden_size"] == found["hidden_size"])
            & (table["tokens_per_parameter"] == found["tokens_per_parameter"])
        ]
        curve = fit(cell["base_rate"], cell["val_loss"], result["base"])
        assert found["losses"] == list(curve.losses)
        assert (found["optimum"], found["regret"], found["edge"]) == (
            curve.optimum, curve.regret, curve.edge,
        )  # fmt: skip
        assert found["measured_regret"] == curve.measured_regret >= 0
    assert (out / "tune.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_same_command_again_trains_nothing_and_says_the_same(swept):
    _, _, (_, first), (status, second) = swept
    assert status == 0 and "6 of 6 runs have ended before" in second
    assert (
        first[first.index("optimizer.muonh_lr:") :] == second[second.index("optimizer.muonh_lr:") :]
    )


def write_runs(out, loss_of, *arguments):
    """Records and recipes of a sweep of nano that never ran; `loss_of(config, factor)` is the loss, or a status."""
    for config in planned("--recipe=nano", "--out", out, *arguments):
        factor = config.optimizer.muonh_lr / 0.02
        loss = loss_of(config, factor)
        record = describe(config, architecture_of(config)) | {"val_fingerprint": "same"}
        record |= (
            {"status": loss} if isinstance(loss, str) else {"status": "finished", "val_loss": loss}
        )
        config.folder.mkdir(parents=True)
        save_config(config, config.folder / "config.yaml")
        (config.folder / "run.json").write_text(json.dumps(record))


def optimum_of(config):
    return 0.02 * (1.3 if config.model.hidden_size == 48 else 0.9)


def parabola(config, factor):
    return 2.0 + 0.2 * math.log(0.02 * factor / optimum_of(config)) ** 2


@pytest.fixture(scope="module")
def moved_runs(tmp_path_factory):
    """Records of exact parabolas, in a folder that was moved since, with a run of another kind."""
    here, there = (tmp_path_factory.mktemp("moved") / name for name in ("here", "there"))
    write_runs(here, parabola, *FEW)
    shutil.move(here, there)
    (there / "other-run").mkdir()
    (there / "other-run" / "run.json").write_text("{}")
    return there


def test_analysis_needs_nothing_but_recipes_and_records(moved_runs):
    """Constants known: optimum 0.026 at width 48, 0.018 elsewhere; regrets 0.2·log(1.3)² and 0.2·log(0.9)² nats."""
    status, text = call("--out", moved_runs, "--analyse")
    assert status == 0
    result = json.loads((moved_runs / "tune.json").read_text())
    assert len(result["conditions"]) == 6
    for found in result["conditions"]:
        factor = 1.3 if found["hidden_size"] == 48 else 0.9
        assert found["optimum"] == pytest.approx(0.02 * factor, rel=1e-9)
        assert found["loss"] == pytest.approx(2.0, rel=1e-9)
        assert found["regret"] == pytest.approx(0.2 * math.log(factor) ** 2, rel=1e-6)
    assert (
        "does not transfer to r = 1, width 48, 10 tokens per parameter (regret 0.014 nats" in text
    )
    assert "transfers within 0.002 nats over 4 of 6 conditions" in text


def test_diverged_and_unfinished_runs_are_shown_and_left_out(tmp_path):
    def losses(config, factor):
        if config.model.hidden_size == 64 and factor == 2:
            return "diverged"
        return "running" if config.model.hidden_size == 48 else parabola(config, factor)

    write_runs(tmp_path / "runs", losses, *FEW)
    status, text = call("--out", tmp_path / "runs", "--analyse")
    assert status == 0 and "10 running: not in the curves." in text
    assert text.count("diverged: 0.04") == 4
    found = json.loads((tmp_path / "runs" / "tune.json").read_text())["conditions"]
    assert len(found) == 4
    for condition in found:
        assert condition["hidden_size"] == 64
        assert condition["optimum"] == pytest.approx(0.018, rel=1e-9)
        assert condition["diverged"] == [0.04] and len(condition["rates"]) == 4
    table = pd.read_csv(tmp_path / "runs" / "tune.csv")
    assert (table["status"] == "diverged").sum() == 4 and len(table) == 30


def test_several_seeds_give_means_and_the_noise_between_them(tmp_path):
    """Seeds ±0.01: the sample deviation of two is 0.01·√2; the fit is of their mean."""

    def losses(config, factor):
        return parabola(config, factor) + (0.01 if config.seed else -0.01)

    write_runs(
        tmp_path / "runs",
        losses,
        "--seeds=0,1",
        "--recurrences=4",
        "--widths=48,64",
        "--horizons=10",
    )
    status, text = call("--out", tmp_path / "runs", "--analyse")
    assert status == 0 and text.count("within the noise") == 2
    for found in json.loads((tmp_path / "runs" / "tune.json").read_text())["conditions"]:
        assert found["seed_sd"] == pytest.approx(0.01 * 2**0.5, rel=1e-9)
        assert found["runs"] == 10 and found["above_noise"] is False
        assert min(found["losses"]) == pytest.approx(
            min(2.0 + 0.2 * math.log(rate / found["optimum"]) ** 2 for rate in found["rates"]),
            rel=1e-9,
        )


def test_the_figure_has_widths_left_and_horizons_right_and_marks_the_base_rate(moved_runs):
    runs, reference = read_runs(moved_runs, "muonh_lr")
    assert reference == (64, 10.0)
    curves = {
        Condition(int(r), int(d), float(h)): fit(cell["base_rate"], cell["val_loss"], 0.02)
        for (r, d, h), cell in runs.groupby(["recurrences", "hidden_size", "tokens_per_parameter"])
    }
    figure = sweep_figure(curves, reference, "optimizer.muonh_lr")
    left, right = figure.axes
    for axis, words in ((left, ("width 48", "width 64")), (right, ("10 tokens", "20 tokens"))):
        labels = [text.get_text() for text in axis.get_legend().get_texts()]
        assert len(labels) == 5 and "base rate 0.02" in labels
        assert all(any(word in label for label in labels) for word in words)
        assert axis.get_xscale() == "log"
    points = [line for line in left.lines if line.get_label() == "r = 1, width 48"]
    expected = 0.2 * np.log(np.array([0.5, 0.7, 1, 1.4, 2]) / 1.3) ** 2  # regrets
    np.testing.assert_allclose(points[0].get_ydata(), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--field=optimizer.momentum"], "--field is 'optimizer.momentum': it must be a base learning rate"),
        (["--field=muonh_lr"], "optimizer.muonh_lr, optimizer.embedding_lr"),
        (["--factors=0.5,1"], "--factors is 0.5,1: at least three factors"),
        (["--factors=0.5,0.9,2"], "and 1, the base rate itself"),
        (["--factors=0.5,1,1,1"], "at least three factors"),
        (["--factors=-1,1,2"], "--factors is '-1,1,2': every number must be positive and finite"),
        (["--factors=1,2,nan"], "every number must be positive"),
        (["--factors=1,2,x"], "--factors is '1,2,x': give numbers between commas"),
        (["--widths=48.5"], "--widths is '48.5': give whole numbers"),
        (["--widths=50"], "r = 1, width 50, 10 tokens per parameter: hidden_size is 50: must be a multiple of"),
        (["--recurrences=3"], "r = 3, width"),
        (["--horizons=0"], "every number must be positive"),
        (["--horizons=0.0001"], "30 tokens are less than one step of batch_tokens = 1,024"),
        (["--seeds=-1"], "--seeds is '-1': every number must be at least 0"),
        (["--jobs=0"], "--jobs is 0"),
        (["model.hidden_size=32"], "model.hidden_size=32: the sweep sets this field itself"),
        (["steps=3"], "steps=3: the sweep sets this field itself"),
        (["optimizer.muon_lr=3"], "optimizer.muon_lr"),
        (["--recipe=nan"], "--recipe is 'nan': no such recipe. Use one of "),
        (["--analyse"], "holds no runs of optimizer.muonh_lr"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error_and_leaves_nothing(tmp_path, arguments, words):
    status, text = call("--recipe=nano", "--out", tmp_path / "out", *arguments)
    assert status == 2 and text.startswith("error: ") and text.count("error: ") == 1
    assert words in text, text
    assert not (tmp_path / "out").exists()


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    """Another base rate, other validation text, and none that has ended."""
    out = tmp_path / "runs"
    write_runs(out, parabola, "--recurrences=1", "--widths=64", "--horizons=10")
    folder = out / "muonh_lr-r1-d64-h10-x1-seed0"
    config, record = (
        load_config(folder / "config.yaml"),
        json.loads((folder / "run.json").read_text()),
    )

    save_config(
        replace(config, optimizer=replace(config.optimizer, muonh_lr=0.03)), folder / "config.yaml"
    )
    status, text = call("--out", out, "--analyse")
    assert status == 2 and "different base rates (0.02 to 0.03): one folder a sweep" in text
    save_config(config, folder / "config.yaml")

    (folder / "run.json").write_text(json.dumps(record | {"val_fingerprint": "another"}))
    status, text = call("--out", out, "--analyse")
    assert status == 2 and "different data or reference points" in text
    assert not (out / "tune.json").exists()

    shutil.rmtree(out)
    write_runs(out, lambda *_: "failed", "--recurrences=1", "--widths=64", "--horizons=10")
    status, text = call("--out", out, "--analyse")
    assert status == 2 and "none of its 5 runs of muonh_lr has ended" in text


@pytest.mark.slow
def test_the_command_with_its_worker_processes(recipe_file, tmp_path):
    command = [
        sys.executable,
        "-m",
        "training.tune",
        "--recipe",
        recipe_file,
        "--out",
        tmp_path / "runs",
    ]
    done = subprocess.run(
        [*command, *TINY, "--jobs=2"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "6 of 6 runs finished" in done.stderr
    assert len(json.loads((tmp_path / "runs" / "tune.json").read_text())["conditions"]) == 2
