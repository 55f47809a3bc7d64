"""`python -m evaluation depth` against one row at a time, and what it refuses."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from evaluation.command import main
from scaling import fit_saturation
from scaling.runs import read_raw

BOS = 1


@pytest.fixture
def run(tools, tmp_path):
    """A finished run of four recurrences with ten validation rows in two shards, of two documents each."""

    def make(name="a", **record):
        folder = tmp_path / "runs" / name
        tools.make_looped(recurrences=4).save_pretrained(folder / "checkpoint")
        known = {"run_id": name, "recurrences": 4, "status": "finished", "val_fingerprint": "x"}
        (folder / "run.json").write_text(json.dumps(known | record))
        return folder

    rows = np.random.default_rng(0).integers(2, 512, size=(10, 17), dtype=np.uint16)
    rows[:, 0] = rows[:, 7] = BOS
    split = tmp_path / "runs" / "data" / "validation"
    split.mkdir(parents=True)
    np.save(split / "00000-of-00002.npy", rows[:6])
    np.save(split / "00001-of-00002.npy", rows[6:])
    metadata = {"splits": {"validation": {"sha256": "x"}}, "tokenizer": {"bos_token_id": BOS}}
    (split.parent / "metadata.json").write_text(json.dumps(metadata))
    make.rows = torch.from_numpy(rows.astype(np.int64))
    return make


def depth(folder, out, *options, recurrences="1,2,6"):
    return main(["depth", str(folder), "--recurrences", recurrences, "--out", str(out), *options])


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_losses_are_those_of_one_row_at_a_time(run, tmp_path, apart, suffix):
    """Documents that are kept apart are scored alone; means and errors over rows."""
    from hf_looped import LoopedForCausalLM

    folder, out = run(separate_documents=apart), tmp_path / f"depth{suffix}"
    assert depth(folder, out, "--batch-size", "4") == 0
    table = read_raw(out).set_index("test_recurrences")
    model = LoopedForCausalLM.from_pretrained(folder / "checkpoint")
    for t in (1, 2, 6):
        means = []
        for row in run.rows:
            logits = []
            for part in (row[:7], row[7:]) if apart else (row,):
                with torch.no_grad():
                    logits.append(model(part[None], num_recurrences=t).logits[0])
            scores = torch.cat(logits)[:-1]
            means.append(torch.nn.functional.cross_entropy(scores, row[1:]).item())
        assert table.loss[t] == pytest.approx(np.mean(means), abs=1e-5)  # sums in float32
        assert table.loss_stderr[t] == pytest.approx(np.std(means, ddof=1) / 10**0.5, abs=1e-5)
        assert (table.tokens[t], table.recurrences[t]) == (160, 4)


def test_what_is_measured_is_kept_and_measured_again_for_other_weights_or_rows(
    run, tools, tmp_path, monkeypatch
):
    from evaluation import depth as module

    measured = []
    original = module._Run.loss

    def counting(self, recurrences, batch_size):
        measured.append((self.name, recurrences))
        return original(self, recurrences, batch_size)

    monkeypatch.setattr(module._Run, "loss", counting)
    folder, out = run(), tmp_path / "depth.csv"
    assert depth(folder, out) == 0
    assert depth(folder, out, recurrences="2,3") == 0
    assert measured == [("a", 1), ("a", 2), ("a", 6), ("a", 3)]
    before = pd.read_csv(out)
    assert depth(run("b"), out, recurrences="1") == 0
    assert len(pd.read_csv(out)) == 5
    shutil.rmtree(folder / "checkpoint")
    tools.make_looped(recurrences=4, injection="additive").save_pretrained(folder / "checkpoint")
    assert depth(folder, out, recurrences="1,2,3,6") == 0
    after = pd.read_csv(out)
    assert len(after) == 5 and not set(before.loss) & set(after[after.run_id == "a"].loss)
    assert depth(folder, out, "--rows", "3", recurrences="1") == 0
    assert pd.read_csv(out).set_index(["run_id", "test_recurrences"]).tokens["a", 1] == 48


def test_the_table_is_what_the_saturating_law_is_fitted_to(run, tmp_path):
    folder, out = run(), tmp_path / "depth.csv"
    assert depth(folder, out, recurrences="1,2,3,4,6,8") == 0
    found = fit_saturation(read_raw(out), loss="loss")
    assert found.curves[0].mu == 4 and found.curves[0].n_points == 6


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"status": "running"}, [], "its status is running. Finish it first"),
        ({"val_fingerprint": "y"}, [], "val_fingerprint is x, but a was validated on y"),
        ({}, ["--data", "/nowhere"], "there are no packed rows"),
        ({}, ["--rows", "0"], "--rows is 0, but must be at least 1"),
        ({}, ["--recurrences", "1,x"], "--recurrences is '1,x', but must list whole numbers"),
        ({}, ["--recurrences", "0"], "--recurrences is '0', but must list whole numbers"),
        ({}, ["--out", "depth.xlsx"], "the extension '.xlsx' is not one of"),
    ],
)
def test_what_cannot_be_measured_is_named(run, tmp_path, capsys, record, options, message):
    folder = run(**record)
    assert depth(folder, tmp_path / "depth.csv", *options) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_run_and_a_run_without_checkpoint_are_named(run, tmp_path, capsys):
    assert depth(tmp_path, tmp_path / "depth.csv") == 2
    assert "there is no run.json" in capsys.readouterr().err
    folder = run()
    shutil.rmtree(folder / "checkpoint")
    assert depth(folder, tmp_path / "depth.csv") == 2
    assert "it has no checkpoint" in capsys.readouterr().err
