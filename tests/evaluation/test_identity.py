"""What a result belongs to: a change of anything that moves a loss scores again, and never mixes with what was."""

import json
import math
import shutil

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM, set_seed

from evaluation.command import main
from evaluation.results import axis_loss, read_results, with_losses
from evaluation.run import load_task, run_task, settings_of
from evaluation.suite import AXES

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def checkpoint(tools, byte_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    tools.make_llama().save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(checkpoint, tmp_path):
    """A folder with one finished run."""
    folder = tmp_path / "runs" / "a"
    record = {
        "run_id": "a",
        "recurrences": 1,
        "val_loss": 3.0,
        "n_once": 1,
        "n_rec": 1,
        "tokens": 1,
    }
    shutil.copytree(checkpoint, folder / "checkpoint")
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def double_weights(folder):
    """Save other weights in place."""
    path = folder / "model.safetensors"
    weights = {name: value * 2 for name, value in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


CHANGES = {
    "max_length": (["--max-length", "30"], None),
    "dtype": (["--dtype", "bfloat16"], None),
    "BOS": (["--no-bos"], None),
    "limit": (["--limit", "5"], None),
    "weights": ([], double_weights),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["runs", "model"])
def test_a_change_scores_again_there_and_back(run, data, capsys, form, change):
    """The second command gives the number of a first one, and the third that of the first."""
    options, edit = CHANGES[change]
    checkpoint, out = run / "checkpoint", run / "evaluation.json"
    kept = (checkpoint / "model.safetensors").read_bytes()

    def score(*options):
        which = ["--runs", str(run.parent)]
        if form == "model":
            which = ["--model", str(checkpoint), "--out", str(out)]
        assert main([*which, "--data", str(data), "--tasks", "svamp", *options]) == 0
        return json.loads(out.read_text())["loss/svamp"]

    first = score()
    if edit:
        edit(checkpoint)
    changed = score(*options)
    out.rename(out.with_name("kept.json"))
    fresh = score(*options)
    out.with_name("kept.json").rename(out)
    assert changed == fresh != first
    (checkpoint / "model.safetensors").write_bytes(kept)
    assert score() == first


def test_edited_rows_are_refused_until_they_are_prepared(checkpoint, data, tmp_path, capsys):
    rows = tmp_path / "rows"
    shutil.copytree(data, rows)
    path = rows / "svamp.jsonl"
    path.write_text(path.read_text().replace("seven", "eleven"))
    words = ["--model", str(checkpoint), "--data", str(rows), "--tasks", "svamp", "--limit", "4"]
    assert main(words) == 2
    assert "svamp.jsonl is not as `prepare` wrote it" in capsys.readouterr().err
    assert (
        main(["prepare", "--out", str(rows), "--from", str(rows), "--partial", "--tasks", "svamp"])
        == 0
    )
    assert main(words) == 0


def test_an_axis_of_tasks_that_were_scored_differently_has_no_mean():
    tasks = AXES["looped_math"]
    alike = {task: {"loss": 1.0, "limit": 8, "weights": "a", "asked": {}} for task in tasks}
    assert axis_loss(alike, tasks, incomplete=False) == 1.0
    for name, value in (("limit", 9), ("weights", "b"), ("asked", {"bos": False})):
        mixed = {**alike, tasks[0]: {**alike[tasks[0]], name: value}}
        assert axis_loss(mixed, tasks, incomplete=True) is None


def test_flat_losses_are_those_of_the_model_that_was_asked_for_last(
    tools, checkpoint, byte_tokenizer, data, tmp_path
):
    other, out = tmp_path / "other", tmp_path / "out.json"
    tools.make_looped().save_pretrained(other)
    byte_tokenizer.save_pretrained(other)
    losses = []
    for folder in (checkpoint, other, checkpoint):
        words = ["--model", str(folder), "--data", str(data), "--tasks", "svamp", "--limit", "4"]
        assert main([*words, "--out", str(out)]) == 0
        losses.append(json.loads(out.read_text())["loss/svamp"])
    assert losses[0] == losses[2] != losses[1]


def test_losses_of_your_own_stay_where_they_are():
    results = {"loss/mine": 2.5, "loss/svamp": 9.0, "evaluations": {}}
    assert with_losses(results, "x") == {"loss/mine": 2.5, "evaluations": {}}


def test_layers_that_see_a_window_get_the_losses_of_a_direct_computation(
    tools, byte_tokenizer, data
):
    """Prompts of some hundred tokens, windows of 32: a row of several choices would need its own mask."""
    set_seed(0)
    config = MistralConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, sliding_window=32,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    lm = tools.loaded(model, byte_tokenizer)
    found = run_task(
        lm, load_task("arc_easy", data, "whole"), settings_of("arc_easy", data, 8, "whole")
    )
    nats = tokens = 0.0
    for prompt, row in tools.documents(data / "arc_easy.jsonl", 10)[:8]:
        losses, scored, _ = tools.losses(model, byte_tokenizer, prompt, row["choices"][row["gold"]])
        nats, tokens = nats + sum(losses), tokens + len(scored)
    assert found["loss"] == pytest.approx(nats / tokens, abs=1e-6)


def test_a_run_that_cannot_be_scored_is_named_and_the_others_are(run, data, capsys):
    second = run.parent / "b"
    shutil.copytree(run, second)
    (second / "run.json").write_text((run / "run.json").read_text().replace('"a"', '"b"'))
    for path in (run / "checkpoint").glob("tokenizer*"):
        path.unlink()
    words = ["--runs", str(run.parent), "--data", str(data), "--tasks", "svamp", "--limit", "4"]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert "failed: " in text and "no tokenizer could be loaded" in text
    assert "1 of 2 runs could not be scored" in text
    table = pd.read_csv(run.parent / "runs.csv").set_index("run_id")["loss/svamp"]
    assert math.isnan(table["a"]) and table["b"] > 0


def damage(checkpoint, how):
    path = checkpoint / "model.safetensors"
    if how == "torn":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        weights = load_file(path)
        save_file({n: v * float("nan") for n, v in weights.items()}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("how", "message"),
    [("torn", "no causal LM could be loaded"), ("NaN", "logits of random tokens are not finite")],
)
def test_damaged_weights_are_named(run, data, capsys, how, message):
    damage(run / "checkpoint", how)
    words = ["--model", str(run / "checkpoint"), "--data", str(data), "--tasks", "svamp"]
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        '{"evaluations": []}',
        '{"evaluations": {"x": 3}}',
        '{"evaluations": {"x": {"svamp": 3}}}',
        '{"evaluations": {"x": {"svamp": {}}}}',
        '{"evaluations": {"x": {"svamp": {"loss": "low"}}}}',
        "[1]",
        "{",
    ],
)
def test_results_of_another_shape_are_named(tmp_path, text):
    path = tmp_path / "evaluation.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"evaluation\.json: .* Remove it to score again"):
        read_results(path)


@pytest.mark.parametrize("text", ["{", '{"svamp": 3}', "[]"])
def test_a_damaged_list_of_sources_is_named(checkpoint, data, tmp_path, capsys, text):
    shutil.copytree(data, tmp_path / "rows")
    (tmp_path / "rows" / "sources.json").write_text(text)
    words = ["--model", str(checkpoint), "--data", str(tmp_path / "rows"), "--tasks", "svamp"]
    assert main(words) == 2
    assert "sources.json: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"context": "Q", "continuation": "caf\xe9"}', "line 41: not UTF-8"),
        (b'{"context": "Q", "continuation": "\\ud800"}', "line 41: continuation holds half of a"),
        (b'{"context": " ", "continuation": "5"}', "line 41: context is empty"),
    ],
)
def test_text_that_cannot_be_scored_is_named_with_its_line(tools, tmp_path, capsys, row, message):
    tools.write_rows(tmp_path, "svamp", tools.make_rows("svamp"))
    with (tmp_path / "svamp.jsonl").open("ab") as file:
        file.write(row + b"\n")
    words = ["prepare", "--out", str(tmp_path / "out"), "--from", str(tmp_path), "--partial"]
    assert main([*words, "--tasks", "svamp"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", ","], "No task is named"),
        (["--tasks", "svamp", "--out", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["--tasks", "svamp", "--max-length", "1"], "looped_svamp: a continuation of"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(checkpoint, data, capsys, options, message):
    assert main(["--model", str(checkpoint), "--data", str(data), *options]) == 2
    assert message in capsys.readouterr().err


def test_positions_that_a_model_does_not_have_are_named(byte_tokenizer, data, tools):
    from transformers import GPT2Config, GPT2LMHeadModel

    def model(positions):
        config = GPT2Config(vocab_size=512, n_positions=positions, n_embd=32, n_layer=1, n_head=2)
        return GPT2LMHeadModel(config)

    lm = tools.loaded(model(64), byte_tokenizer, max_length=200)
    settings = settings_of("svamp", data, 4, None)
    with pytest.raises(ValueError, match="tokens are too many for this model"):
        run_task(lm, load_task("svamp", data, None), settings)
    found = run_task(
        tools.loaded(model(8), byte_tokenizer), load_task("svamp", data, None), settings
    )
    assert found["truncated"] == 4
