"""Trackers see what a run logs, go on where it goes on, and never stand in its way.

TensorBoard is the real one, read back by its own reader. W&B and Trackio are small stand-ins with the functions that
Accelerate's trackers call, since the real ones want an account or a server.
"""

import importlib.util
import logging
import os
import random
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import PartialState

from training.trackers import Trackers, check_tracker

SETTINGS = {
    "seed": 3,
    "variant": "baseline",
    "budget_flops": None,
    "data": {"sequence_length": 32, "files": ["a", "b"]},
    "optimizer": {"muonh_lr": 0.014, "deeper": {"nesterov": True}},
}
FLAT = {
    "seed": 3,
    "variant": "baseline",
    "budget_flops": "None",
    "data.sequence_length": 32,
    "data.files": "['a', 'b']",
    "optimizer.muonh_lr": 0.014,
    "optimizer.deeper.nesterov": True,
}


@pytest.fixture(autouse=True)
def accelerate_state(monkeypatch):
    """Accelerate's trackers ask it which process this is; a run has set it up."""
    PartialState(cpu=not torch.cuda.is_available())
    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_LOGIN_TIMEOUT", "TRACKIO_PROJECT"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


def read_scalars(folder):
    """{tag: [(step, value), …]} of all event files of a run folder's tensorboard/."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    reader = event_accumulator.EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0}
    )
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in tags}


def read_hyperparameters(folder):
    """One dictionary for each time that settings were stored."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found = []
    for place in sorted({path.parent for path in folder.rglob("*/events.out*")}):
        reader = EventAccumulator(str(place))
        reader.Reload()
        if "_hparams_/session_start_info" in reader.summary_metadata:
            metadata = reader.summary_metadata["_hparams_/session_start_info"]
            content = HParamsPluginData.FromString(metadata.plugin_data.content)
            values = content.session_start_info.hparams
            found.append({k: getattr(v, v.WhichOneof("kind")) for k, v in values.items()})
    return found


def test_tensorboard_shows_what_was_logged(tmp_path):
    """TensorBoard holds values in float32."""
    with Trackers("tensorboard", tmp_path, "run", SETTINGS) as trackers:
        trackers.log({"step": 1, "loss": 5.5, "gradient_norm/coda": 0.1, "note": "text"}, 1)
        trackers.log({"step": 2, "loss": 5.25, "tokens": 256}, 2)
        trackers.log({"val_loss": float("nan")}, 2)
    scalars = read_scalars(tmp_path)
    assert set(scalars) == {"loss", "gradient_norm/coda", "tokens", "val_loss"}
    assert scalars["loss"] == [(1, 5.5), (2, 5.25)]
    assert scalars["tokens"] == [(2, 256)]
    assert scalars["gradient_norm/coda"] == [(1, float(np.float32(0.1)))]
    assert np.isnan(scalars["val_loss"][0][1])


def test_tensorboard_holds_the_settings_once_also_of_a_resumed_run(tmp_path):
    for step in (0, 5):
        Trackers("tensorboard", tmp_path, "run", SETTINGS, step=step).close()
    (stored,) = read_hyperparameters(tmp_path)
    assert stored == FLAT


def test_a_resumed_run_continues_its_curve_and_drops_the_steps_that_are_done_again(tmp_path):
    """Killed after step 5, with a state of step 3: steps 4 and 5 come again, with other values here."""
    first = Trackers("tensorboard", tmp_path, "run", SETTINGS)
    for step in range(1, 6):
        first.log({"loss": 10.0 + step, "lost": 1.0}, step)
    first.tracker.writer.flush()  # and not closed
    with Trackers("tensorboard", tmp_path, "run", SETTINGS, step=3) as second:
        for step in range(4, 7):
            second.log({"loss": 20.0 + step}, step)
    first.close()
    scalars = read_scalars(tmp_path)
    assert scalars["loss"] == [(1, 11), (2, 12), (3, 13), (4, 24), (5, 25), (6, 26)]
    assert [step for step, _ in scalars["lost"]] == [1, 2, 3]


def test_runs_one_after_another_in_a_process_have_their_own_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with Trackers("tensorboard", tmp_path / name, name, SETTINGS) as trackers:
            trackers.log({"loss": float(ord(name))}, 1)
    assert read_scalars(tmp_path / "a") == {"loss": [(1, 97)]}
    assert read_scalars(tmp_path / "b") == {"loss": [(1, 98)]}


def test_random_numbers_of_the_run_are_left_alone(tmp_path):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with Trackers("tensorboard", tmp_path, "run", SETTINGS) as trackers:
        trackers.log({"loss": 1.0}, 1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()


def test_none_writes_and_says_nothing(tmp_path, capfd, caplog):
    check_tracker("none")
    with Trackers("none", tmp_path, "run", SETTINGS) as trackers:
        trackers.log({"loss": 1.0}, 1)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "") and not caplog.records


class Fake:
    """Stands in for wandb or trackio: init(project, …), config.update, and a run with log and finish."""

    def __init__(self, name):
        self.calls, self.fail = [], None
        self.module = ModuleType(name)
        self.module.__spec__ = ModuleSpec(name, None, origin="stand-in")
        self.module.init = self.init
        self.module.config = SimpleNamespace(update=self.note("config"))

    def note(self, what):
        def call(*arguments, **named):
            self.calls.append((what, *arguments, named))
            if self.fail == what:
                raise ConnectionError("no\nnetwork")

        return call

    def init(self, **named):
        self.note("init")(**named)
        return SimpleNamespace(log=self.note("log"), finish=self.note("finish"))

    def named(self, what):
        return [call[1:] for call in self.calls if call[0] == what]


@pytest.fixture(params=["wandb", "trackio"])
def fake(request, monkeypatch):
    stand_in = Fake(request.param)
    monkeypatch.setitem(sys.modules, request.param, stand_in.module)
    stand_in.name = request.param
    return stand_in


def test_settings_and_values_reach_the_tracker(fake, tmp_path):
    check_tracker(fake.name)
    with Trackers(fake.name, tmp_path, "run-a", SETTINGS) as trackers:
        trackers.log({"step": 4, "loss": 2.5, "note": "text"}, 4)
    assert [call[0] for call in fake.calls] == ["init", "config", "log", "finish"]
    assert fake.named("config") == [(FLAT, {"allow_val_change": True})]
    assert fake.named("log") == [({"loss": 2.5}, {"step": 4})]


def test_a_run_keeps_its_identity_and_one_made_anew_gets_another(fake, tmp_path, monkeypatch):
    def identity(folder):
        folder.mkdir(exist_ok=True)
        Trackers(fake.name, folder, "run: a", SETTINGS).close()
        named = fake.named("init")[-1][0]
        assert named["project"] == "hf-looped" and named["resume"] == "allow"
        if fake.name == "wandb":
            assert named["name"] == "run: a" and named["dir"] == str(folder)
        return named["id" if fake.name == "wandb" else "name"]

    first = identity(tmp_path / "a")
    assert re.fullmatch(r"run- a-[0-9a-f]{8}", first)  # W&B refuses a colon in an id
    assert identity(tmp_path / "a") == first
    (tmp_path / "a").rename(tmp_path / "moved")
    assert identity(tmp_path / "moved") == first
    assert identity(tmp_path / "a") != first


def test_the_environment_names_project_and_folder(fake, tmp_path, monkeypatch):
    monkeypatch.setenv(f"{fake.name.upper()}_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    monkeypatch.setenv("WANDB_LOGIN_TIMEOUT", "7")
    Trackers(fake.name, tmp_path, "run", SETTINGS).close()
    named = fake.named("init")[0][0]
    assert named["project"] == "mine"
    assert named.get("dir", "elsewhere") == "elsewhere"


def test_a_login_is_not_waited_for_without_end(tmp_path, monkeypatch):
    stand_in = Fake("wandb")
    monkeypatch.setitem(sys.modules, "wandb", stand_in.module)
    stand_in.module.init = lambda **named: seen.append(os.environ["WANDB_LOGIN_TIMEOUT"])
    seen = []
    Trackers("wandb", tmp_path, "run", SETTINGS).close()
    monkeypatch.setenv("WANDB_LOGIN_TIMEOUT", "7")
    Trackers("wandb", tmp_path, "run", SETTINGS).close()
    assert seen == ["30", "7"]


@pytest.mark.parametrize(
    ("fails", "doing", "calls"),
    [
        ("init", "starting", ["init"]),
        ("config", "starting", ["init", "config", "finish"]),
        ("log", "logging", ["init", "config", "log", "finish"]),
        ("finish", "closing", ["init", "config", "log", "log", "finish"]),
    ],
)
def test_a_tracker_that_fails_is_named_once_and_switched_off(
    fails, doing, calls, fake, tmp_path, caplog
):
    """And closed, or W&B would take the next run of this process for the same one."""
    fake.fail = fails
    with Trackers(fake.name, tmp_path, "run", SETTINGS) as trackers:
        trackers.log({"loss": 2.5}, 1)
        trackers.log({"loss": 2.4}, 2)
    assert [call[0] for call in fake.calls] == calls
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{fake.name}: {doing} failed (ConnectionError: no network); the run goes on without it."
    )


def test_a_tracker_that_fails_again_when_closed_is_still_named_once(fake, tmp_path, caplog):
    with Trackers(fake.name, tmp_path, "run", SETTINGS) as trackers:
        fake.module.init = None
        trackers.tracker.run = SimpleNamespace()  # neither log nor finish
        trackers.log({"loss": 2.5}, 1)
    assert len(caplog.records) == 1 and "AttributeError" in caplog.text


def test_a_folder_in_which_nothing_can_be_written_does_not_stop_a_run(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file in the way")
    with Trackers("tensorboard", tmp_path, "run", SETTINGS) as trackers:
        trackers.log({"loss": 2.5}, 1)
    assert len(caplog.records) == 1 and "tensorboard: starting failed" in caplog.text


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy(name, monkeypatch):
    monkeypatch.setattr("training.trackers.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"report_to is '{name}'.*pip install {name}`.*none"):
        check_tracker(name)


def test_a_folder_named_like_the_package_is_not_taken_for_it(tmp_path, monkeypatch):
    """W&B leaves a folder wandb/ where it ran, which Python imports as an empty package."""
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("wandb") is not None
    with pytest.raises(ValueError, match="wandb is not installed"):
        check_tracker("wandb")
