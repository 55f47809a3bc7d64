"""A run that was stopped, killed or damaged ends with the bits of one that was not."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from training import loop
from training.loop import Interrupted, train


def log_lines(config):
    return (config.folder / "log.jsonl").read_text().splitlines()


def stop_after(steps):
    """Say stop once `steps` steps have been asked about."""
    asked = []

    def stop():
        asked.append(1)
        return len(asked) >= steps

    return stop


def stop(config, steps):
    with pytest.raises(Interrupted, match=rf"{config.name}: stopped after step \d of 8"):
        train(config, stop_asked=stop_after(steps))


def assert_same_end(one, other):
    """Equal bits of every weight, the same bytes of the log and of the samples, the same record of results."""
    for name in ("log.jsonl", "samples.md"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes(), name
    a, b = (load_file(c.folder / "checkpoint" / "model.safetensors") for c in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    records = [json.loads((c.folder / "run.json").read_text()) for c in (one, other)]
    for record in records:
        for field in ("run_id", "wall_s", "tokens_per_s"):
            del record[field]
    assert records[0] == records[1] and records[0]["status"] == "finished"


@pytest.fixture(scope="module")
def straight(recipe):
    """A run of eight steps that nothing happened to."""
    config = recipe("straight")
    train(config)
    return config


@pytest.mark.parametrize(
    "fields",
    [
        ("model.state_init=normal",),
        ("model.injection=hyperconnections",),
        pytest.param(
            ("micro_batch_rows=1", "compile=true"),
            marks=[
                pytest.mark.slow,  # half a minute of compiling
                # torch's own, as in the model's tests of compiling
                pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
                pytest.mark.filterwarnings(
                    "ignore:.*should not be instantiated:DeprecationWarning"
                ),
            ],
        ),
    ],
    ids=["random state", "hyperconnections", "compiled"],
)
def test_a_stopped_run_resumes_bit_for_bit(recipe, fields):
    """Stopped twice, in the middle; `random state` draws noise at every step, which must be the same noise."""
    name = fields[-1].split("=")[1]
    unharmed, stopped = recipe(f"unharmed-{name}", *fields), recipe(f"stopped-{name}", *fields)
    train(unharmed)
    for steps in (3, 2):
        stop(stopped, steps)
        assert json.loads((stopped.folder / "run.json").read_text())["status"] == "running"
        assert not (stopped.folder / "checkpoint").exists()
        torch.rand(7)  # something else draws in between
    train(stopped)
    assert_same_end(unharmed, stopped)


def test_a_killed_run_goes_on_from_its_last_state_bit_for_bit(recipe, straight, monkeypatch):
    """Killed in step 7 with a state after step 5: the log's line 6 is dropped and written again."""
    killed = recipe("killed", "checkpoint_every=5")
    whole = loop._Run._step

    def dying(run, step, watch):
        if step == 6:
            raise KeyboardInterrupt
        return whole(run, step, watch)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_step", dying)
        with pytest.raises(KeyboardInterrupt):
            train(killed)
    assert len(log_lines(killed)) == 6
    with (killed.folder / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # half a line, as a killed process leaves
    (killed.folder / "state" / "step-000000006.partial").mkdir()  # half a state
    train(killed)
    assert_same_end(straight, killed)


def test_a_run_killed_before_its_first_state_or_after_its_last_step_loses_nothing(
    recipe, straight, monkeypatch
):
    early, late = recipe("early"), recipe("late")
    for config, method in ((early, "_save_state"), (late, "_evaluate")):
        with monkeypatch.context() as patch:

            def die(run):
                raise KeyboardInterrupt

            patch.setattr(loop._Run, method, die)
            with pytest.raises(KeyboardInterrupt):
                train(config)
        assert len(log_lines(config)) == 8
    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_step", lambda *_: pytest.fail("trained again"))
        train(late)
    train(early)
    assert_same_end(straight, early)
    assert_same_end(straight, late)


def test_a_damaged_state_is_named_and_the_one_before_leads_to_the_same_end(
    recipe, straight, capsys
):
    config = recipe("damaged", "checkpoint_every=2", "checkpoints_kept=2")
    stop(config, 5)
    state = config.folder / "state" / "step-000000005" / "optimizer.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    train(config)
    said = "".join(capsys.readouterr().err.split())  # lines are wrapped anywhere
    assert "warning:" in said and "optimizer.safetensorshas" in said
    assert_same_end(straight, config)


def test_a_full_disk_stops_the_run_and_it_goes_on_when_there_is_room(recipe, straight, monkeypatch):
    """The third state can't be written; the record, on the same disk, neither."""
    config = recipe("full", "checkpoint_every=2")
    saved, recorded = loop.save_state, loop.write_record

    def full(accelerator, folder, model, optimizer, counters, kept):
        if counters.step == 6:
            monkeypatch.setattr(loop, "write_record", no_space)
            raise no_space()
        saved(accelerator, folder, model, optimizer, counters, kept)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_state", full)
        with pytest.raises(OSError, match="No space left"):
            train(config)
    monkeypatch.setattr(loop, "write_record", recorded)
    assert [p.name[-1] for p in sorted((config.folder / "state").iterdir())] == ["2", "4"]
    train(config)
    assert_same_end(straight, config)


def test_a_stop_asked_after_the_last_step_finishes(recipe):
    assert train(recipe("late-stop", "steps=3"), stop_asked=stop_after(3))["status"] == "finished"


def test_the_last_states_are_kept_and_none_when_finished(recipe):
    config = recipe("states", "checkpoint_every=2", "checkpoints_kept=2")
    stop(config, 5)
    assert sorted(p.name[-1] for p in (config.folder / "state").iterdir()) == ["4", "5"]
    train(config)
    assert not (config.folder / "state").exists()


def test_what_changes_no_number_may_differ_when_a_run_goes_on(recipe, straight):
    config = recipe("moved-on")
    stop(config, 3)
    train(replace(config, checkpoint_every=1, checkpoints_kept=5))
    assert_same_end(straight, config)
    with pytest.raises(ValueError, match="another recipe"):
        train(replace(config, log_every=2))


def test_a_run_that_is_being_trained_is_not_begun_twice(recipe):
    """Asked from inside the run itself, at its first step."""
    config, refusals = recipe("twice", "steps=2"), []

    def again():
        with pytest.raises(ValueError, match=r"twice is being trained by process \d+ on") as error:
            train(config)
        refusals.append(error)
        return False

    assert train(config, stop_asked=again)["status"] == "finished"
    assert len(refusals) == 2
