"""What a plan says it will take, against sums by hand and against the files of a real run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from training import costs
from training.costs import disk, free_bytes, gpu_hours, model_bytes, needs, state_bytes
from training.data import open_packed
from training.grid import PlannedRun
from training.loop import Interrupted, train
from training.record import architecture_of, describe


def planned(config):
    return PlannedRun(config=config, record=describe(config, architecture_of(config)), seconds=1.0)


def run_of(n_once, n_rec, n_norm, n_embedding, out, kept=2, tokens=1000):
    """A run of which only the counts matter; T = 10."""
    config = SimpleNamespace(
        checkpoints_kept=kept,
        data=SimpleNamespace(sequence_length=10),
        data_folder=out / "data",
    )
    record = {"n_once": n_once, "n_rec": n_rec, "n_norm": n_norm, "n_embedding": n_embedding}
    record |= {"tokens": tokens, "total_flops": 1e18, "vocab_size": 70_000}
    return SimpleNamespace(config=config, record=record)


def test_disk_of_a_grid_counted_by_hand(tmp_path):
    """10 matrix weights (weight + momentum), 3 others (weight + 2 moments), 4 bytes each: 116; times 4, 2, 1.

    Two states kept and one being written, of the two largest runs; three models; rows of 11 tokens for 10 targets, 4
    bytes each (a vocabulary above 2^16).
    """
    runs = [run_of(6 * k, 4 * k, k, 2 * k, tmp_path, tokens=1000 * k) for k in (4, 1, 2)]
    assert [state_bytes(run) for run in runs] == [464, 116, 232]
    assert [model_bytes(run) for run in runs] == [208, 52, 104]
    need = disk(runs, jobs=2)
    assert (need.states, need.models, need.data) == (3 * (464 + 232), 364, 4400 * 4)
    assert need.peak == 2088 + 364 + 17_600 and need.end == 364 + 17_600
    (tmp_path / "data").mkdir()
    assert disk(runs, jobs=2).data == 0  # it is there


def test_a_grid_with_nothing_to_run_takes_nothing():
    assert disk([], jobs=2).peak == 0


def test_gpu_hours_of_an_exaflop():
    """1e18 FLOPs at half of 1e15 a second: 2,000 s."""
    assert gpu_hours(1e18, 0.5, 1e15) == pytest.approx(2000 / 3600)
    for mfu, peak in ((0.0, 1e15), (1.5, 1e15), (0.4, 0.0)):
        with pytest.raises(ValueError, match="--mfu is .* --peak-flops"):
            gpu_hours(1e18, mfu, peak)


def test_the_sentence_has_the_numbers(tmp_path):
    runs = [run_of(6000, 4000, 1000, 2000, tmp_path)]
    text = needs(runs, 4, 0.5, 1e15)
    assert text.startswith("GPU-hours: 0.556 at 50% of 1e+15 FLOPs/s.")
    assert "while 1 run at once" in text and "states 348.0 kB, models 52.0 kB" in text


def test_states_and_model_of_a_real_run_are_as_large_as_planned(recipe):
    """Beyond the tensors there are headers of about 150 bytes a tensor, JSON files, and the tokenizer."""
    config = recipe(
        "disk", "steps=4", "checkpoint_every=1", "checkpoints_kept=2", "model.hidden_size=64"
    )
    run = planned(config)
    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        train(config, stop_asked=lambda: next(asked))
    states = list((config.folder / "state").iterdir())
    assert len(states) == 2
    for state in states:
        real = sum(path.stat().st_size for path in state.iterdir())
        assert 0 <= real - state_bytes(run) < 0.05 * state_bytes(run) + 20_000
    train(config)
    real = (config.folder / "checkpoint" / "model.safetensors").stat().st_size
    assert 0 <= real - model_bytes(run) < 0.05 * model_bytes(run)
    assert not (config.folder / "state").exists()  # as `Disk.end` says


def test_packed_rows_of_a_real_run_are_as_large_as_planned(recipe):
    config = recipe("disk-data", "steps=1")
    train(config)
    run = planned(config)
    tokens = open_packed(config.data_folder).train_tokens
    run = replace(run, record=run.record | {"tokens": tokens})
    real = sum(path.stat().st_size for path in (config.data_folder / "train").glob("*.npy"))
    assert real == pytest.approx(costs.data_bytes([run]), rel=0.1)


def test_free_bytes_are_those_of_the_disk_that_will_hold_the_folder(tmp_path):
    assert free_bytes(tmp_path / "not" / "there") == pytest.approx(free_bytes(tmp_path), rel=0.1)
