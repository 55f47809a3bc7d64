"""One run from recipe to record: what it writes, that it resumes exactly, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_looped import LoopedForCausalLM
from hf_looped.accounting import parameters
from training import loop
from training.config import resolve
from training.data import open_packed
from training.loop import train
from training.record import architecture_of
from training.sampler import rows_of_step
from training.tokenizer import train_tokenizer

ROOT = Path(loop.__file__).parents[1]
T = 32


def read_log(config):
    return [json.loads(line) for line in (config.folder / "log.jsonl").read_text().splitlines()]


def weights(config):
    return load_file(config.folder / "checkpoint" / "model.safetensors")


def packed_rows(config, split):
    rows = getattr(open_packed(config.data_folder), split)
    return torch.tensor(rows[np.arange(len(rows))]).long()


def losses_of(model, inputs, targets):
    """−log softmax of the targets from the logits alone, in float64. [B, T] → [B, T]"""
    with torch.no_grad():
        logits = model(input_ids=inputs, use_cache=False).logits.double()
    return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


@pytest.fixture(scope="module")
def finished(recipe):
    config = recipe("finished", "steps=12", "evaluation_rows=7")
    progress = []
    return config, train(config, progress.append), progress


def test_the_record_has_the_columns_of_the_run_table(finished):
    config, record, _ = finished
    assert record == json.loads((config.folder / "run.json").read_text())
    columns = """
    schema_version run_id recurrences n_once n_rec tokens val_loss budget_flops shared_depth hidden_size
    train_flops_per_token n_injection n_norm n_embedding status variant seed effective_depth num_prelude_layers
    num_recurrent_layers num_coda_layers injection backprop_recurrences sequence_length vocab_size
    forward_flops_per_token total_flops steps batch_tokens val_tokens weight_bytes kv_bytes_per_token wall_s
    tokens_per_s data_fingerprint val_fingerprint git_commit versions separate_documents
    """.split()
    assert not set(columns) - set(record)
    assert record["status"] == "finished" and record["schema_version"] == 1
    assert record["tokens"] == 12 * 4 * T == record["steps"] * record["batch_tokens"]
    assert record["total_flops"] == record["tokens"] * record["train_flops_per_token"]
    assert record["val_tokens"] == len(packed_rows(config, "validation")) * T
    assert record["wall_s"] > 0 and record["tokens_per_s"] > 0
    for name, value in record.items():
        assert not isinstance(value, dict | list), name  # one flat row


def test_the_record_counts_the_parameters_of_the_saved_model(finished):
    config, record, _ = finished
    total = sum(record[name] for name in ("n_once", "n_rec", "n_norm", "n_embedding"))
    model = AutoModelForCausalLM.from_pretrained(config.folder / "checkpoint")
    assert total == sum(p.numel() for p in model.parameters())
    assert total == parameters(model.config).total


def test_the_checkpoint_has_the_loss_that_the_record_says(finished):
    """Evaluated here from the saved files alone, in float64 after the logits: float32 rounding, 1e-5."""
    config, record, _ = finished
    model = AutoModelForCausalLM.from_pretrained(config.folder / "checkpoint")
    assert model.dtype == torch.float32
    rows = packed_rows(config, "validation")
    assert len(rows) % config.evaluation_rows  # the last batch is short: means must be weighted
    loss = losses_of(model, rows[:, :-1], rows[:, 1:]).mean().item()
    assert record["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_the_checkpoint_brings_the_tokenizer_that_made_the_rows(finished):
    config, _, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(config.folder / "checkpoint")
    text = "a looped model reads the prelude 3."
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    start = packed_rows(config, "validation")[0, :20]
    shown = tokenizer.decode(start[1:])
    assert shown.strip(" .") in Path(config.data.files[0]).read_text()
    model = AutoModelForCausalLM.from_pretrained(config.folder / "checkpoint")
    assert model.config.bos_token_id == tokenizer.bos_token_id == start[0]
    assert model.config.vocab_size >= len(tokenizer)


def test_the_loss_goes_down_and_starts_at_the_logarithm_of_the_vocabulary(finished):
    """The LM head starts near zero (σ = 0.001): all of 320 entries are equally likely, up to 0.01."""
    config, record, _ = finished
    log = read_log(config)
    assert [entry["step"] for entry in log] == list(range(1, 13))
    assert log[0]["loss"] == pytest.approx(np.log(record["vocab_size"]), abs=0.01)
    assert log[-1]["loss"] < log[0]["loss"] - 1
    assert record["val_loss"] < log[0]["loss"] - 1


def test_logged_rates_follow_the_schedule(finished):
    """Linear from the peak: 1 − 0.9·k/12; at the reference point the peak of norms is the base rate."""
    config, _, _ = finished
    log = read_log(config)
    for role in ("matrix", "embedding", "lm_head", "norm"):
        peak = log[0][f"lr/{role}"]
        for k, entry in enumerate(log):
            assert entry[f"lr/{role}"] == pytest.approx(peak * (1 - 0.9 * k / 12), rel=1e-12)
    assert log[0]["lr/norm"] == config.optimizer.norm_lr


def test_the_first_logged_loss_and_gradient_norm_are_those_of_the_batch_in_one_piece(finished):
    """A fresh model of the same seed, one forward over all rows of step 0: no factor for parts. Rounding, 1e-4."""
    config, _, _ = finished
    torch.manual_seed(config.seed)
    model = LoopedForCausalLM(architecture_of(config)).train()
    rows = packed_rows(config, "train")
    batch = rows[rows_of_step(0, 4, len(rows), config.seed)]
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    entry = read_log(config)[0]
    assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert entry["gradient_norm"] == pytest.approx(norm, rel=1e-4)


def test_sections_gradients_and_the_states_of_the_first_batch_are_logged(finished):
    """A fresh model of the same seed gives the states of step 0; their norms in float64. Rounding, 1e-5."""
    config, _, _ = finished
    first, *later = read_log(config)
    sections = ("embedding", "prelude", "injection", "recurrent", "coda", "norm", "lm_head")
    names = {f"gradient_norm/{section}" for section in sections}
    assert names == {name for name in first if name.startswith("gradient_norm/")}
    squares = sum(first[name] ** 2 for name in names)
    assert first["gradient_norm"] == pytest.approx(squares**0.5, rel=1e-6)
    torch.manual_seed(config.seed)
    model = LoopedForCausalLM(architecture_of(config)).train()
    rows = packed_rows(config, "train")
    batch = rows[rows_of_step(0, 4, len(rows), config.seed)]
    with torch.no_grad():
        output = model(input_ids=batch[:, :-1], use_cache=False, output_recurrent_states=True)
    one, two = (state.double().numpy() for state in output.recurrent_states)
    expected = {
        "state_norm/1": np.sqrt(np.mean(one**2)),
        "state_norm/2": np.sqrt(np.mean(two**2)),
        "state_change/2": np.sqrt(np.sum((two - one) ** 2) / np.sum(one**2)),
    }
    found = {name: value for name, value in first.items() if name.startswith("state_")}
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(entry.keys() == first.keys() for entry in later)


def test_compile_is_a_switch_of_the_recipe(recipe, monkeypatch):
    """What it compiles to is tested with the model, and that such a run resumes in test_resume."""
    compiled = []
    monkeypatch.setattr(
        LoopedForCausalLM, "compile", lambda model, *_, **__: compiled.append(model)
    )
    train(recipe("not-compiled", "steps=1"))
    assert compiled == []
    train(recipe("to-compile", "steps=1", "compile=true"))
    assert len(compiled) == 1


def test_progress_tells_every_logged_step(finished):
    config, _, progress = finished
    assert [p.step for p in progress] == list(range(1, 13))
    assert all(p.steps == 12 and p.tokens_per_s > 0 for p in progress)
    assert [p.loss for p in progress] == [entry["loss"] for entry in read_log(config)]


def test_a_finished_run_is_returned_without_training(finished, monkeypatch):
    config, record, _ = finished
    monkeypatch.setattr(loop, "_Run", lambda *_: pytest.fail("trained again"))
    assert train(config) == record


def test_another_recipe_in_the_same_folder_is_refused(finished):
    config, record, _ = finished
    before = (config.folder / "config.yaml").read_bytes()
    with pytest.raises(
        ValueError, match=r"finished holds a run with another recipe.*another run_id"
    ):
        train(replace(config, seed=1))
    assert (config.folder / "config.yaml").read_bytes() == before
    assert json.loads((config.folder / "run.json").read_text()) == record


def test_micro_batches_change_losses_and_weights_by_rounding_only(recipe):
    """A factor on the gradient would not show in the weights, since both optimisers normalise: the logged norm tells.

    Sums in another order, 1e-7, grow over 8 steps through Adam's division by small gradients (weights measured
    1e-5 apart).
    """
    whole, parts = recipe("whole", "micro_batch_rows=4"), recipe("parts", "micro_batch_rows=1")
    a, b = train(whole), train(parts)
    assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-5)
    first, *later = zip(read_log(whole), read_log(parts), strict=True)
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-6)
    for one, other in (first, *later):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-5)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], weight, rtol=1e-3, atol=3e-4)


def test_separate_documents_have_the_loss_they_have_alone(recipe):
    """Every document of a validation row alone, from position 0; without separation the loss is another one."""
    config = recipe("separate", "data.separate_documents=true")
    record = train(config)
    assert record["separate_documents"] is True
    model = AutoModelForCausalLM.from_pretrained(config.folder / "checkpoint")
    rows, alone = packed_rows(config, "validation"), []
    bos = model.config.bos_token_id
    for row in rows:
        starts = [i for i in range(T) if row[i] == bos] + [T]
        for start, end in zip(starts, starts[1:], strict=False):
            inputs, targets = row[None, start:end], row[None, start + 1 : end + 1]
            alone += losses_of(model, inputs, targets).flatten().tolist()
    assert len(alone) == rows.shape[0] * T
    assert record["val_loss"] == pytest.approx(np.mean(alone), rel=1e-5)  # float32 rounding
    mixed = losses_of(model, rows[:, :-1], rows[:, 1:]).mean().item()
    assert abs(mixed - record["val_loss"]) > 1e-3


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged_with_its_step(recipe, monkeypatch):
    config = recipe("diverged")
    whole, calls = loop._Run._forward, []

    def breaking(run, *args, **kwargs):
        calls.append(1)
        loss, states = whole(run, *args, **kwargs)
        return loss * (float("nan") if len(calls) == 4 else 1.0), states

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_forward", breaking)
        record = train(config)
    assert (record["status"], record["diverged_step"]) == ("diverged", 4)
    assert record["not_finite"].startswith("loss, gradient_norm")
    assert "val_loss" not in record and not (config.folder / "checkpoint").exists()
    assert [entry["step"] for entry in read_log(config)] == [1, 2, 3]
    assert train(config) == record  # it has ended


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_ends_the_run_before_it_reaches_a_weight(
    recipe, monkeypatch, bad
):
    """One entry of one gradient, while the loss is as it should be; the section that it is in is named."""
    config, models = recipe(f"diverged-{bad}"), []
    whole = loop._Run._forward

    def breaking(run, *args, **kwargs):
        if run.counters.step == 2 and not models:
            models.append(run.unwrapped)
            weight = run.unwrapped.model.recurrent[0].mlp.up_proj.weight
            hook = weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), bad))
            models.append({k: v.clone() for k, v in run.unwrapped.state_dict().items()})
            run.hook = hook
        return whole(run, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_forward", breaking)
        record = train(config)
    assert (record["status"], record["diverged_step"]) == ("diverged", 3)
    assert record["not_finite"] == "gradient_norm, gradient_norm/recurrent"
    model, before = models
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_validation_loss_that_is_not_finite_is_diverged_too(recipe, monkeypatch):
    monkeypatch.setattr(loop._Run, "_evaluate", lambda run: (float("inf"), 1))
    record = train(recipe("diverged-late", "steps=2"))
    assert (record["status"], record["diverged_step"]) == ("diverged", 2)
    assert "val_loss" not in record


def test_a_failure_is_recorded_and_raised_and_the_next_try_starts_anew(recipe, monkeypatch):
    config = recipe("failing", "steps=3")

    def broken(*_, **__):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_forward", broken)
        with pytest.raises(RuntimeError, match="out of luck"):
            train(config)
    record = json.loads((config.folder / "run.json").read_text())
    assert (record["status"], record["error"]) == ("failed", "RuntimeError: out of luck")
    again = train(config)
    assert again["status"] == "finished" and "error" not in again


def test_more_tokens_than_the_corpus_has_need_allow_repeat(recipe):
    held = len(packed_rows(recipe("x"), "train")) * T
    steps = held // (4 * T) + 3
    short = [f"steps={steps}", "batch_tokens=128", "model.effective_depth=2", "model.recurrences=1"]
    with pytest.raises(
        ValueError, match=r"tokens: .*asked.*1\.\d+ epochs.*data\.allow_repeat=true"
    ):
        train(recipe("too-long", *short))
    # The remedy that the message names must work with the very same command.
    record = train(recipe("too-long", *short, "data.allow_repeat=true", "log_every=1000"))
    assert record["status"] == "finished" and record["tokens"] > held


def test_a_field_that_was_wrong_can_be_put_right_under_the_same_name(recipe, tmp_path):
    """A run that was refused before its first step has left nothing that belongs to its recipe."""
    overrides = ["steps=2", f"out={tmp_path}"]
    with pytest.raises(ValueError, match=r"data\.files"):
        train(recipe("typo", *overrides, "data.files=[no-such-file.txt]"))
    assert train(recipe("typo", *overrides))["status"] == "finished"


def test_a_tokenizer_larger_than_the_vocabulary_of_the_model_is_refused(recipe, tmp_path):
    """Before anything is packed: the planned size where it is trained, its size where it is given."""
    with pytest.raises(ValueError, match=r"data\.vocab_size is 300, above model\.vocab_size = 256"):
        recipe("small-vocabulary", "model.vocab_size=256")
    folder = tmp_path / "tokenizer"
    train_tokenizer(["another corpus of words"] * 9, 280).save_pretrained(folder)
    size = len(AutoTokenizer.from_pretrained(folder))
    config = recipe(
        "given", "model.vocab_size=200", f"data.tokenizer={folder}", f"out={tmp_path / 'runs'}"
    )
    with pytest.raises(
        ValueError, match=rf"model\.vocab_size is 200.*tokenizer has {size} tokens.*at least {size}"
    ):
        train(config)
    assert not (tmp_path / "runs").exists()


def test_packed_data_of_another_length_or_tokenizer_are_refused(recipe, finished, tmp_path):
    with pytest.raises(
        ValueError, match=r"data\.sequence_length: .* was made with 32, asked for now is 16"
    ):
        train(recipe("other-T", "data.sequence_length=16"))
    train_tokenizer(["another corpus of words"] * 9, 280).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(
        ValueError, match=r"data\.tokenizer: .* was made with None, asked for now is"
    ):
        train(recipe("other-tokenizer", f"data.tokenizer={tmp_path / 'tokenizer'}"))


def test_an_empty_corpus_is_refused(recipe, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    config = recipe("empty", f"data.files=[{tmp_path / 'empty.txt'}]", f"out={tmp_path / 'out'}")
    with pytest.raises(ValueError, match=r"data\.corpus: 'text'.*no (documents|data)"):
        train(config)
    assert not config.data_folder.exists() and not (config.folder / "run.json").exists()


@pytest.fixture
def fresh_accelerator():
    """Accelerate keeps one precision a process: forget it before and after."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_bf16_runs_on_cpus_with_float32_weights_and_nearly_the_loss_of_fp32(
    finished, recipe, fresh_accelerator
):
    """bf16 has 8 bits: the loss of 12 steps differs by some thousandths, and by something."""
    config = recipe("bf16", "steps=12", "precision=bf16")
    record = train(config)
    assert record["precision"] == "bf16" and finished[1]["precision"] == "fp32"
    assert all(weight.dtype == torch.float32 for weight in weights(config).values())
    difference = abs(record["val_loss"] - finished[1]["val_loss"])
    assert 0 < difference < 0.05


def test_runs_of_different_precision_may_follow_each_other_in_a_process(recipe, fresh_accelerator):
    """A worker of a sweep trains whatever the grid's variants say, one after another."""
    for precision in ("fp32", "bf16"):
        record = train(recipe(f"mixed-{precision}", "steps=1", f"precision={precision}"))
        assert (record["status"], record["precision"]) == ("finished", precision)


def test_runs_with_another_seed_differ_and_with_the_same_are_equal(recipe):
    configs = [recipe(f"seed-{i}", "steps=2", f"seed={seed}") for i, seed in enumerate((0, 0, 1))]
    losses = [train(config)["val_loss"] for config in configs]
    assert losses[0] == losses[1] != losses[2]


def test_every_architecture_reads_the_same_rows(recipe, monkeypatch):
    whole, seen = loop._Run._forward, {}
    for name, fields in {
        "unlooped": ["model.recurrences=1"],
        "wide": ["model.hidden_size=32"],
        "parts": ["micro_batch_rows=2"],
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(
                loop._Run,
                "_forward",
                lambda run, model, rows, *args, name=name: (
                    seen.setdefault(name, []).append(rows) or whole(run, model, rows, *args)
                ),
            )
            train(recipe(f"reads-{name}", "steps=2", *fields))
    assert len({np.concatenate(rows).tobytes() for rows in seen.values()}) == 1


def test_a_budget_gives_round_c_over_flops_steps(recipe_fields):
    """Steps by hand: round(C / (F·B)), at least one."""
    from training.record import describe

    for budget in (1.0, 3e9, 3.3e9):
        config = resolve(recipe_fields, [f"budget_flops={budget}"])
        record = describe(config, architecture_of(config))
        exact = budget / (record["train_flops_per_token"] * 4 * T)
        assert record["steps"] == max(1, round(exact)) and record["budget_flops"] == budget
