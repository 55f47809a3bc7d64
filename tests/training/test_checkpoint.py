"""States on disk: whole or not there, verified file by file, never unpickled."""

import errno
import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

from hf_looped import LoopedConfig, LoopedForCausalLM
from training import checkpoint, files
from training.checkpoint import Counters, load_state, save_state
from training.config import OptimizerConfig
from training.hyperp import parameter_groups
from training.muonh import MuonH

FILES = ("counters.json", "manifest.json", "model.safetensors", "optimizer.safetensors")
RATES = {"matrix": 0.02, "embedding": 0.1, "lm_head": 0.01, "norm": 0.01, "scalar": 0.01}


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def build(seed=0):
    """A model and its optimiser after one step, so that every parameter has a state."""
    torch.manual_seed(seed)
    config = LoopedConfig(
        vocab_size=32,
        hidden_size=16,
        num_attention_heads=2,
        num_prelude_layers=1,
        num_recurrent_layers=1,
        num_coda_layers=1,
        num_recurrences=2,
    )
    model = LoopedForCausalLM(config)
    optimizer = MuonH(parameter_groups(model, RATES, OptimizerConfig()))
    ids = torch.randint(32, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return model, optimizer


def contents(model, optimizer):
    """Every tensor of model and optimiser by name."""
    parameters = dict(model.named_parameters())
    states = {
        f"{name} {field}": value
        for name, parameter in parameters.items()
        for field, value in optimizer.state[parameter].items()
    }
    return {name: p.detach().clone() for name, p in parameters.items()} | states


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


@pytest.fixture
def saved(accelerator, tmp_path):
    """Two states, after 3 and 6 steps, of different weights; what the older holds."""
    old, new = build(1), build(2)
    save_state(accelerator, tmp_path, *old, Counters(step=3, wall_s=1.5), kept=2)
    save_state(accelerator, tmp_path, *new, Counters(step=6, wall_s=3.0), kept=2)
    return tmp_path, contents(*old), contents(*new)


def test_a_state_gives_back_weights_optimiser_and_counters_bit_for_bit(saved):
    folder, _, newer = saved
    model, optimizer = build(5)
    assert load_state(folder, model, optimizer) == Counters(step=6, wall_s=3.0)
    assert_equal(contents(model, optimizer), newer)
    assert sorted(path.name for path in (folder / "step-000000006").iterdir()) == sorted(FILES)


def test_without_states_the_counters_are_fresh_and_nothing_is_touched(tmp_path):
    model, optimizer = build()
    before = contents(model, optimizer)
    assert load_state(tmp_path, model, optimizer) == Counters()
    assert_equal(contents(model, optimizer), before)


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncated, flipped, os.unlink], ids=lambda d: d.__name__)
def test_a_damaged_file_is_named_and_the_state_before_is_used(saved, name, damage):
    folder, older, _ = saved
    damage(folder / "step-000000006" / name)
    model, optimizer = build(5)
    warnings = []
    counters = load_state(folder, model, optimizer, warn=warnings.append)
    assert counters == Counters(step=3, wall_s=1.5)
    assert_equal(contents(model, optimizer), older)
    (message,) = warnings
    assert f"step-000000006/{name}" in message or name == "manifest.json"
    assert "step-000000006" in message and "the state before it is used" in message


def test_states_of_which_none_is_whole_are_refused_and_not_taken_for_a_new_run(saved):
    folder, *_ = saved
    for place in folder.iterdir():
        truncated(place / "model.safetensors")
    with pytest.raises(ValueError, match=r"2 state\(s\), none of them whole .*delete the folder"):
        load_state(folder, *build())


def test_the_last_k_states_are_kept(accelerator, tmp_path):
    model, optimizer = build()
    for step in range(1, 6):
        save_state(accelerator, tmp_path, model, optimizer, Counters(step=step), kept=3)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["3", "4", "5"]


def test_a_full_disk_leaves_the_older_states_and_nothing_else(saved, accelerator, monkeypatch):
    """The third write fails as a full disk does, after part of the state is there."""
    folder, _, newer = saved
    model, optimizer = build(3)
    write = checkpoint.save_file
    calls = []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        OSError, match=r"after step 9 can't be written .*No space left.*step-000000006 is whole"
    ):
        save_state(accelerator, folder, model, optimizer, Counters(step=9), kept=2)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000000003", "step-000000006"]
    assert load_state(folder, model, optimizer).step == 6
    assert_equal(contents(model, optimizer), newer)


def test_a_state_that_a_killed_process_left_half_written_is_passed_over(saved, accelerator):
    folder, _, newer = saved
    shutil.copytree(folder / "step-000000003", folder / "step-000000009.partial")
    model, optimizer = build(3)
    assert load_state(folder, model, optimizer).step == 6
    save_state(accelerator, folder, model, optimizer, Counters(step=9), kept=1)
    assert [p.name for p in folder.iterdir()] == ["step-000000009"]
    assert_equal(contents(model, optimizer), newer)


def test_a_state_of_another_model_is_refused(saved):
    folder, *_ = saved
    config = LoopedConfig(vocab_size=32, hidden_size=16, num_attention_heads=2, num_coda_layers=3)
    model = LoopedForCausalLM(config)
    with pytest.raises(ValueError, match="state of another model: .* is in one of them only"):
        load_state(folder, model, MuonH(parameter_groups(model, RATES, OptimizerConfig())))


def test_nothing_is_unpickled(saved, monkeypatch):
    def refuse(*_, **__):
        pytest.fail("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert load_state(saved[0], *build()).step == 6


def test_every_file_is_flushed_before_the_state_gets_its_name(accelerator, tmp_path, monkeypatch):
    """A power cut after the rename must find the contents on the disk, not in its cache."""
    events = []
    sync, rename = os.fsync, os.replace

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def replacing(source, target):
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "replace", replacing)
    save_state(accelerator, tmp_path, *build(), Counters(step=1), kept=1)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    partial = tmp_path / "step-000000001.partial"
    assert {str(partial), *(str(partial / name) for name in FILES)} <= set(before)
    assert str(tmp_path) in after


def test_the_manifest_says_size_and_digest_of_every_other_file(saved):
    place = saved[0] / "step-000000006"
    manifest = json.loads((place / "manifest.json").read_text())
    assert sorted(manifest) == sorted(set(FILES) - {"manifest.json"})
    for name, written in manifest.items():
        assert written["bytes"] == (place / name).stat().st_size


def test_counters_are_those_that_were_saved_even_if_changed_later(accelerator, tmp_path):
    model, optimizer = build()
    counters = Counters(step=1, wall_s=2.0)
    save_state(accelerator, tmp_path, model, optimizer, counters, kept=1)
    asked = replace(counters)
    counters.step = 7
    assert load_state(tmp_path, model, optimizer) == asked


@pytest.mark.parametrize("kept", [1, 2])
def test_a_damaged_later_state_does_not_push_out_the_whole_ones(saved, accelerator, kept):
    """The run went on from step 3, since the state of step 6 is damaged; its next state must stay."""
    folder, *_ = saved
    truncated(folder / "step-000000006" / "model.safetensors")
    model, optimizer = build(7)
    save_state(accelerator, folder, model, optimizer, Counters(step=4), kept=kept)
    assert [p.name[-1] for p in sorted(folder.iterdir())] == ["3", "4"][-kept:]
    assert load_state(folder, *build(8)).step == 4


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", "3", '{"model.safetensors": 3}', '{"model.safetensors": {}}']
)
def test_a_manifest_that_is_json_but_names_no_files_is_damaged_too(saved, text):
    folder, older, _ = saved
    (folder / "step-000000006" / "manifest.json").write_text(text)
    model, optimizer = build(5)
    warnings = []
    assert load_state(folder, model, optimizer, warn=warnings.append).step == 3
    assert "manifest.json can't be read" in warnings[0]
    assert_equal(contents(model, optimizer), older)
