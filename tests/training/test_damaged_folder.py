"""A run's folder that was damaged, or its data replaced, while it waited to go on."""

import errno
import json
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from training import loop
from training.loop import Interrupted, train


@pytest.fixture
def stopped(recipe, tmp_path):
    """A run of six steps that was stopped after the fourth, in an OUT of its own."""
    config = recipe("stopped", "steps=6", f"out={tmp_path}", "checkpoint_every=2")
    steps = iter(range(1, 7))
    with pytest.raises(Interrupted):
        train(config, stop_asked=lambda: next(steps) == 4)
    return config


def lines(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_damaged_record_is_named_and_without_it_the_run_goes_on(stopped, text):
    record = stopped.folder / "run.json"
    record.write_text(text)
    with pytest.raises(ValueError, match=r"run\.json is damaged .*Delete it: the run goes on"):
        train(stopped)
    record.unlink()
    assert train(stopped)["status"] == "finished"


@pytest.mark.parametrize("name", ["log.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("tail", ["garbage\n", "\0\0\0\n", "[]\n", "{}\n", '{"step": "x"}\n'])
def test_lines_of_a_log_that_are_no_entries_are_dropped(stopped, name, tail, capsys):
    """As after a power cut, which may leave zeros at the end of a file."""
    with (stopped.folder / name).open("a") as file:
        file.write(tail)
    assert train(stopped)["status"] == "finished"
    assert lines(stopped.folder / name) == [1, 2, 3, 4, 5, 6]
    assert "lacks" not in capsys.readouterr().err


def test_entries_that_a_log_lost_are_named(stopped, capsys):
    log = stopped.folder / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:1]))
    assert train(stopped)["status"] == "finished"
    said = " ".join(capsys.readouterr().err.split())
    assert "log.jsonl lacks 3 entries between steps 2 and 4: it was damaged" in said
    assert lines(log) == [1, 5, 6]


def test_a_state_does_not_go_on_with_other_rows(stopped, corpus_file, tmp_path):
    """The data were deleted and made again from a corpus that has changed since."""
    files = sorted((stopped.data_folder / "train").glob("*"))
    assert files
    before = shutil.copytree(stopped.data_folder, tmp_path / "kept")
    text = corpus_file.read_text()
    try:
        corpus_file.write_text(text.replace("reads", "writes"))
        shutil.rmtree(stopped.data_folder)
        with pytest.raises(
            ValueError, match="was trained on other rows .* Restore the data, or delete"
        ):
            train(stopped)
    finally:
        corpus_file.write_text(text)
    shutil.rmtree(stopped.data_folder)
    before.rename(stopped.data_folder)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "run.json"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
    ids=["OSError", "SafetensorError"],
)
@pytest.mark.parametrize("place", ["save_model", "write_record"])
def test_a_full_disk_is_called_one_wherever_it_shows(stopped, monkeypatch, place, error):
    weights = load_file(stopped.folder / "state" / "step-000000004" / "model.safetensors")

    def full(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(loop, place, full)
        with pytest.raises(OSError, match="the disk is full .*run the same command again"):
            train(stopped)
    again = load_file(stopped.folder / "state" / "step-000000004" / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert train(stopped)["status"] == "finished"
