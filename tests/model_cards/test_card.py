"""A card says what the run directory says, in numbers that an independent count confirms, and refuses the rest."""

import functools
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import jinja2
import pandas as pd
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_looped  # noqa: F401, registers the architecture
from model_cards import build_card, write_card
from model_cards.__main__ import main
from model_cards.card import LICENSES
from model_cards.fit import FIELDS
from model_cards.run import COUNTS, NUMBERS, RECIPE, TEXTS
from training.config import load_config
from training.hyperp import learning_rates

ROOT = Path(__file__).parents[2]


def text_of(run_dir, **choices):
    return build_card(run_dir, **choices).text


def row(text, name):
    """Cells of the table row that begins with `name`."""
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return found.strip("| ").split(" | ")[1:]


def number(text, name):
    """First number of the row, exact."""
    return int(re.search(r"[\d,]+", row(text, name)[0])[0].replace(",", ""))


def section(text, title):
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def refusal(capsys, *arguments):
    """Run the command; return its one line of error."""
    assert main([str(one) for one in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


# Numbers


def test_parameters_are_those_of_the_loaded_checkpoint(run_dir):
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoint")
    count = dict.fromkeys(("once", "rec", "injection", "embedding", "norm"), 0)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            count["embedding"] += parameter.numel()
        elif parameter.ndim == 1:
            count["norm"] += parameter.numel()
        elif ".recurrent." in name or ".injection." in name:
            count["rec"] += parameter.numel()
            count["injection"] += parameter.numel() * (".injection." in name)
        else:
            count["once"] += parameter.numel()
    text = section(text_of(run_dir), "Parameters and compute")
    assert number(text, "N_once, matrices executed once per token") == count["once"]
    assert number(text, "N_rec, matrices in the loop") == count["rec"]
    assert f"(injection: {count['injection']:,})" in text
    assert number(text, "Embedding and LM head") == count["embedding"]
    assert number(text, "RMSNorm gains") == count["norm"]
    total = sum(parameter.numel() for parameter in model.parameters())
    assert number(text, "**Parameters in all**") == total
    assert f"It has {total:,} parameters" in text_of(run_dir)
    in_bf16 = sum(parameter.nbytes for parameter in model.to(torch.bfloat16).parameters())
    assert number(text, "Weights") == in_bf16


def test_forward_flops_are_those_of_the_matrix_products_that_run_plus_gains(run_dir):
    """Gains, two a block, are no products; 2 FLOPs a channel (reference implementation of the paper)."""
    model = AutoModelForCausalLM.from_pretrained(
        run_dir / "checkpoint", attn_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 32, dtype=torch.long), use_cache=False)
    executed, width = 4, 32
    text = text_of(run_dir)
    forward = number(text, "Forward FLOPs per token")
    assert forward == counter.get_total_flops() // 32 + executed * 2 * (2 * width)
    # One of two recurrences is differentiated: its share of the backward pass, two forward passes, is left out.
    per_token, total = number(text, "Training FLOPs per token"), number(text, "Training FLOPs")
    assert 2 * forward < per_token < 3 * forward
    assert total == per_token * 8 * 4 * 32  # steps · rows · tokens
    assert row(text, "Backpropagation") == ["through the last 1 of 2 recurrences (truncated)"]


def test_cache_bytes_are_those_of_a_cache_in_bfloat16(run_dir):
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoint", dtype=torch.bfloat16)
    cache = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).cache
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert number(text_of(run_dir), "KV cache per token") == held / 5


def test_the_architecture_is_the_checkpoints(run_dir):
    text = text_of(run_dir)
    assert row(text, "Layers") == ["prelude 1, recurrent 1, coda 1"]
    assert row(text, "Recurrences r") == ["2"]
    assert row(text, "Executed layers") == ["4 (3 with weights of their own)"]
    assert row(text, "Injection") == ["linear"]
    assert row(text, "Width, MLP width") == ["32, 128 (relu2)"]
    assert row(text, "Heads, key/value heads, head size") == ["4, 2, 8"]
    embedding = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoint").get_input_embeddings()
    assert number(text, "Vocabulary") == embedding.num_embeddings
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "checkpoint")
    assert row(text, "Tokenizer") == [
        f"byte-level BPE trained on the corpus, {len(tokenizer)} tokens"
    ]


def test_an_unlooped_run_is_called_the_baseline(trained):
    text = text_of(trained[1])
    assert "An unlooped language model of 4 layers (r = 1)" in text
    assert row(text, "Injection") == ["none (r = 1)"]
    assert "num_recurrences" not in text


def test_peak_rates_are_those_that_the_trainer_computed(run_dir):
    """To the card's six digits; the log is 8 steps long with the last entry at the lowest rate."""
    config, record = (
        load_config(run_dir / "config.yaml"),
        json.loads((run_dir / "run.json").read_text()),
    )
    peak = learning_rates(
        config.optimizer, config.transfer, config.model, config.batch_tokens, record["tokens"]
    )
    text = text_of(run_dir)
    for name, role, base in (
        ("matrices of the layers and the injection", "matrix", config.optimizer.muonh_lr),
        ("embedding", "embedding", config.optimizer.embedding_lr),
        ("LM head", "lm_head", config.optimizer.lm_head_lr),
        ("RMSNorm gains", "norm", config.optimizer.norm_lr),
    ):
        cells = row(section(text, "Training"), name)
        assert float(cells[1]) == base
        assert float(cells[2]) == pytest.approx(peak[role], rel=1e-5)


def test_the_fingerprints_and_the_commit_are_the_records(run_dir, change):
    change(run_dir / "run.json", git_commit="abc123")
    record, text = json.loads((run_dir / "run.json").read_text()), text_of(run_dir)
    for name in ("recipe_sha256", "corpus_fingerprint", "data_fingerprint", "val_fingerprint"):
        assert f"`{record[name]}`" in text
    assert "commit of the code: `abc123`" in text
    assert f"torch {torch.__version__}" in text


def test_a_run_outside_a_git_checkout_has_no_commit(run_dir, change):
    change(run_dir / "run.json", git_commit=None)
    assert "commit of the code: not recorded" in text_of(run_dir)


def test_no_path_of_the_machine_is_on_the_card(grid, change):
    change(grid / "fit.json", source=str(grid / "runs.csv"), warnings=[f"{grid / 'runs.csv'}: odd"])
    card = str(build_card(grid / "tiny-r2"))
    corpus = Path(load_config(grid / "tiny-r2" / "config.yaml").data.files[0])
    assert row(card, "Made from")[0].startswith("corpus.txt ")
    assert "- runs.csv: odd" in card
    assert str(corpus.parent) not in card
    assert str(grid.parent) not in card


# Metadata


def test_metadata_survive_yaml_and_the_hubs_own_reader(run_dir):
    """`ModelCard.validate` asks the Hub; these are the parts of it that need no network."""
    path = write_card(run_dir, license="apache-2.0", repo_id="me/tiny")
    data = yaml.safe_load(path.read_text().split("---\n")[1])
    assert data["license"] in LICENSES
    assert data["pipeline_tag"] == "text-generation"
    assert "datasets" not in data  # a local corpus is no dataset of the Hub
    assert ModelCard.load(path).data.to_dict() == data
    assert ModelCardData(**data).to_dict() == data
    name, results = model_index_to_eval_results(data["model-index"])
    assert name == "tiny"
    (result,) = results
    assert (result.task_type, result.dataset_name) == ("text-generation", "local text files")
    assert result.metric_value == json.loads((run_dir / "run.json").read_text())["val_loss"]


def test_a_corpus_of_the_hub_is_linked_with_its_config(run_dir, change):
    name = "HuggingFaceFW/fineweb-edu"
    change(run_dir / "run.json", corpus=name, corpus_sources=json.dumps({name: "sample/train"}))
    recipe = yaml.safe_load((run_dir / "config.yaml").read_text())
    recipe["data"] |= {"dataset_config": "sample", "tokenizer": "meta-llama/Llama-2-7b-hf"}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(recipe))
    card = build_card(run_dir)
    assert card.data.datasets == [name]
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.dataset_config) == (name, "sample")
    assert row(card.text, "Made from") == [f"{name} sample/train"]
    assert row(card.text, "Tokenizer")[0].startswith("meta-llama/Llama-2-7b-hf, ")


def test_a_licence_is_never_invented(run_dir):
    card = build_card(run_dir)
    assert "license" not in card.data.to_dict()
    assert "Not stated." in section(card.text, "Licence")


def test_a_licence_without_identifier_is_named_and_linked(run_dir):
    card = build_card(run_dir, license="other", license_name="lab-only", license_link="LICENSE")
    kept = {name: card.data.to_dict()[name] for name in ("license", "license_name", "license_link")}
    assert kept == {"license": "other", "license_name": "lab-only", "license_link": "LICENSE"}
    assert "lab-only: LICENSE" in section(card.text, "Licence")


# Losses


def test_the_validation_loss_has_its_tokens_and_no_task_is_made_up(run_dir):
    record, text = json.loads((run_dir / "run.json").read_text()), text_of(run_dir)
    loss, tokens = row(text, "validation")
    assert float(loss) == pytest.approx(record["val_loss"], abs=5e-7)  # six decimals
    assert tokens.startswith(f"{record['val_tokens']:,} tokens")
    assert "No downstream task was evaluated." in text


def test_downstream_losses_come_by_task_and_axis_from_the_evaluation(run_dir, change):
    evaluation = {
        "loss/svamp": 2.5,
        "loss/looped_math": 3.25,
        "loss/nq": None,
        "tasks": {"svamp": 1},
    }
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation))
    change(run_dir / "run.json", **{"loss/coqa": 1.125})
    card = build_card(run_dir)
    assert row(card.text, "svamp") == ["2.500000", "gold answers"]
    assert row(card.text, "looped_math") == ["3.250000", "gold answers (axis: mean over its tasks)"]
    assert row(card.text, "coqa") == ["1.125000", "gold answers"]
    assert "No downstream task" not in card.text
    found = {one.dataset_name: one.metric_value for one in card.data.eval_results[1:]}
    assert found == {"svamp": 2.5, "looped_math": 3.25, "coqa": 1.125}


# φ


def test_phi_of_the_grid_is_found_above_the_run(grid):
    """The law's own φ = 0.6: the grid has no noise, and the fit's tolerance is far below four digits."""
    text = section(text_of(grid / "tiny-r2"), "What a recurrence is worth")
    assert "φ = 0.6000, 95 % interval [0.600, 0.600]" in text
    assert "here 1.516 times" in text  # 2^0.6
    assert "Source: `grid/fit.json`, a fit of 18 runs of `runs.csv`, column `val_loss`" in text
    assert "This run is one of them." in text


def test_phi_is_found_in_a_folder_beside_the_run(grid):
    (grid / "figures").mkdir()
    (grid / "fit.json").rename(grid / "figures" / "fit.json")
    (grid / "runs.csv").rename(grid / "figures" / "runs.csv")
    text = text_of(grid / "tiny-r2")
    assert "Source: `figures/fit.json`" in text
    assert "This run is one of them." in text


def test_a_fit_of_a_folder_of_run_directories_is_checked_there(grid, change):
    (grid / "runs.csv").unlink()
    change(grid / "fit.json", source="somewhere/grid")
    text = text_of(grid / "tiny-r2")
    assert "a fit of 18 runs of `grid`" in text
    assert "The table holds this run, and 1 finished runs in all" in text


def test_without_its_table_a_fit_is_used_and_said_to_be_unchecked(grid, change, tmp_path):
    change(grid / "fit.json", source="elsewhere/runs.csv")
    fit = (grid / "fit.json").rename(tmp_path / "fit.json")
    (grid / "runs.csv").unlink()
    text = text_of(grid / "tiny-r2", fit=fit)
    assert "φ = 0.6000" in text
    assert "that this run is in it is not checked" in text


def test_without_a_fit_phi_is_not_known(run_dir):
    assert "φ of this run's grid is not known here" in text_of(run_dir)


def test_without_an_interval_the_card_says_why(grid, change):
    interval = json.loads((grid / "fit.json").read_text())["interval"] | {"reason": "too few cells"}
    value = json.loads((grid / "fit.json").read_text()) | {"phi_ci": None, "interval": interval}
    (grid / "fit.json").write_text(json.dumps(value))
    assert "φ = 0.6000, interval unavailable: too few cells." in text_of(grid / "tiny-r2")


def _no_such_run(grid, change):
    table = pd.read_csv(grid / "runs.csv")
    table[table["run_id"] != "tiny-r2"].to_csv(grid / "runs.csv", index=False)


def _other_loss(grid, change):
    change(grid / "tiny-r2" / "run.json", val_loss=5.0)


def _other_budget(grid, change):
    change(grid / "tiny-r2" / "run.json", budget_flops=1.0)


def _other_r(grid, change):
    change(grid / "fit.json", residuals=[{"r": 1}, {"r": 4}])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_such_run, "which has no run tiny-r2"),
        (_other_loss, "where tiny-r2 has val_loss = "),
        (_other_budget, "FLOPs at r = 2, but the run's is 1.0"),
        (_other_r, "is a fit of r = [1, 4], but the run has r = 2"),
    ],
)
def test_a_fit_of_other_runs_is_refused_when_named_and_left_out_when_found(
    grid, change, capsys, spoil, words
):
    spoil(grid, change)
    assert words in refusal(capsys, grid / "tiny-r2", "--fit", grid / "fit.json")
    with pytest.warns(UserWarning, match=re.escape(words)):
        text = text_of(grid / "tiny-r2")
    assert "φ of this run's grid is not known here" in text


def test_two_fits_of_the_table_are_not_chosen_from(grid, capsys):
    (grid / "figures").mkdir()
    shutil.copy(grid / "fit.json", grid / "figures")
    shutil.copy(grid / "runs.csv", grid / "figures")
    assert "several fits are of this run's table" in refusal(capsys, grid / "tiny-r2")


@pytest.mark.parametrize("content", ["{}", '{"phi": 0.5}', "[]", "φ = 0.5", ""])
def test_what_is_no_fit_is_refused(run_dir, tmp_path, capsys, content):
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    said = refusal(capsys, run_dir, "--fit", tmp_path / "x.json")
    assert "x.json" in said
    assert "is no fit" in said or "not JSON" in said or "must hold one JSON object" in said


# Text


def test_the_python_example_loads_the_checkpoint(run_dir):
    text = text_of(run_dir)
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    example = example.replace("path/to/this/folder", str(run_dir / "checkpoint"))
    names: dict[str, object] = {}
    exec(compile(example, "card", "exec"), names)  # the example is our own text
    assert type(names["model"]).__name__ == "LoopedForCausalLM"
    assert len(names["tokenizer"]) > 0


def test_beside_an_export_the_card_tells_how_to_load_its_code(run_dir, tmp_path):
    shutil.copytree(run_dir / "checkpoint", tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM"}
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    path = write_card(run_dir, out=tmp_path / "export" / "README.md", repo_id="me/tiny")
    last = re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)[-1]
    assert '"me/tiny", trust_remote_code=True' in last
    assert "import hf_looped" not in last


def test_the_citations_are_those_of_the_readme_and_of_citation_cff(run_dir):
    text = text_of(run_dir)
    (paper,) = re.findall(r"@article\{.*?\n\}", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert paper in text
    software = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"title  = {{{software['title']}}}" in text
    assert f"author = {{{{{software['authors'][0]['name']}}}}}" in text


@pytest.mark.parametrize("r", [1, 2])
def test_the_template_shows_nothing_that_the_reader_does_not_ask_for(
    trained, grid, r, monkeypatch, tmp_path
):
    """With records cut down to the fields asked for, and an error for every undefined one, the card is the same."""
    source = grid / "tiny-r2" if r == 2 else trained[1]
    whole = text_of(source)
    cut = Path(shutil.copytree(source, tmp_path / "grid2" / source.name))
    record = json.loads((cut / "run.json").read_text())
    kept = {name: record[name] for name in ("schema_version", *TEXTS, *COUNTS, *NUMBERS)}
    (cut / "run.json").write_text(
        json.dumps(kept | {"git_commit": record["git_commit"], "versions": record["versions"]})
    )
    recipe = yaml.safe_load((cut / "config.yaml").read_text())
    asked = {part: {name: recipe[part][name] for name in names} for part, names in RECIPE.items()}
    (cut / "config.yaml").write_text(yaml.safe_dump(asked))
    fit = None
    if r == 2:
        value = json.loads((grid / "fit.json").read_text())
        fit = grid / "fit.json"
        fit.write_text(json.dumps({name: value[name] for name in FIELDS}))
    monkeypatch.setattr(
        jinja2, "Template", functools.partial(jinja2.Template, undefined=jinja2.StrictUndefined)
    )
    assert text_of(cut, fit=fit) == whole


def test_every_table_is_regular_and_no_line_is_lost_to_the_template(grid):
    for choices in ({}, {"author": "A. Author", "license": "mit"}, {"exported": True}):
        text = str(build_card(grid / "tiny-r2", **choices))
        assert "\n\n\n" not in text
        assert "{{" not in text.replace("{{The hf-looped authors}}", "")
        assert "{%" not in text
        assert "None" not in text
        for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
            assert len({line.count("|") for line in table.splitlines()}) == 1


# The command


def test_the_command_writes_the_checkpoints_readme_and_prints_its_path(
    run_dir, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["model_cards", str(run_dir), "--author", "A. Author"])
    monkeypatch.delitem(sys.modules, "model_cards.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("model_cards", run_name="__main__")
    assert ended.value.code == 0
    path = run_dir / "checkpoint" / "README.md"
    assert capsys.readouterr().out == f"{path}\n"
    first = path.read_text()
    assert "Trained by A. Author." in first
    assert first.endswith(".\n")
    assert main([str(run_dir), "--author", "A. Author"]) == 0
    assert path.read_text() == first


def test_the_card_goes_where_it_is_told(run_dir, tmp_path, capsys):
    assert main([str(run_dir), "--out", str(tmp_path / "new" / "card.md")]) == 0
    assert (tmp_path / "new" / "card.md").is_file()
    assert not (run_dir / "checkpoint" / "README.md").exists()
    capsys.readouterr()
    assert "new, a folder. Name the file" in refusal(capsys, run_dir, "--out", tmp_path / "new")


@pytest.mark.parametrize("status", ["running", "failed", "diverged"])
def test_an_unfinished_run_gets_no_card(run_dir, change, capsys, status):
    change(run_dir / "run.json", status=status, val_loss=None)
    assert f"status is '{status}', but a card describes a finished run" in refusal(capsys, run_dir)
    assert not (run_dir / "checkpoint" / "README.md").exists()


def _remove(name):
    def spoil(run_dir, change):
        place = run_dir / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return spoil


def _write(name, text):
    return lambda run_dir, change: (run_dir / name).write_text(text)


def _change(name, **fields):
    return lambda run_dir, change: change(run_dir / name, **fields)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_remove("run.json"), "is no run directory: it has no run.json"),
        (_remove("config.yaml"), "config.yaml: there is no such file"),
        (_remove("log.jsonl"), "log.jsonl: there is no such file"),
        (_remove("checkpoint"), "holds no model"),
        (_remove("checkpoint/model.safetensors"), "holds no model"),
        (_remove("checkpoint/tokenizer.json"), "has no tokenizer that loads"),
        (_write("run.json", "{"), "run.json: not JSON"),
        (_write("run.json", "[1]"), "run.json: holds a list"),
        (_write("config.yaml", "a: [1"), "config.yaml is no valid YAML"),
        (_write("config.yaml", "data: {}"), "config.yaml: data.tokenizer is missing"),
        (_write("log.jsonl", ""), "ends at step None, but the run has 8 steps"),
        (_write("evaluation.json", '{"loss/svamp": "low"}'), "loss/svamp is 'low'"),
        (_change("run.json", val_tokens=None), "run.json: val_tokens is missing"),
        (_change("run.json", val_loss="low"), "val_loss is 'low', but must be a finite number"),
        (_change("run.json", val_loss=float("nan")), "val_loss is nan"),
        (_change("run.json", seed=True), "seed is True, but must be a whole number"),
        (_change("run.json", corpus=1), "corpus is 1, but must be a text"),
        (_change("run.json", corpus_sources="{"), "run.json, corpus_sources: not JSON"),
        (_change("run.json", schema_version=2), "schema_version is 2"),
        (_change("run.json", n_rec=1), "n_rec is 1, but the checkpoint and the other fields give"),
        (_change("run.json", steps=9), "tokens is 1024, but"),
        (_change("checkpoint/config.json", model_type="llama"), "model_type is 'llama'"),
        (_change("checkpoint/config.json", num_recurrences=0), "num_recurrences is 0"),
        (_change("checkpoint/config.json", num_recurrences=3), "recurrences is 2, but"),
    ],
)
def test_a_run_directory_that_does_not_fit_together_gets_one_clear_error(
    run_dir, change, capsys, spoil, words
):
    spoil(run_dir, change)
    assert words in refusal(capsys, run_dir)


def test_a_folder_that_does_not_exist_is_no_run_directory(tmp_path, capsys):
    assert "is no run directory" in refusal(capsys, tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--license", "Apache-2.0"], "no identifier of the Hub. Did you mean apache-2.0?"),
        (["--license", "lab-only"], "--license other --license-name NAME"),
        (["--license", "other"], "say which, --license-name NAME"),
        (["--license", "mit", "--license-name", "MIT"], "describe an `other` licence"),
        (["--repo-id", "a/b/c"], "a/b/c"),
        (["--fit", "nowhere.json"], "nowhere.json: there is no such file"),
    ],
)
def test_a_bad_option_gets_one_clear_error(run_dir, capsys, options, words):
    assert words in refusal(capsys, run_dir, *options)


def test_an_unknown_flag_is_refused_by_its_name(run_dir, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(run_dir), "--licence", "mit"])
    assert ended.value.code == 2
    assert "--licence" in capsys.readouterr().err
