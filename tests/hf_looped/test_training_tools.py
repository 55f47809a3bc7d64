"""Training as Transformers does it: accumulated steps, the Trainer, activation checkpointing, caches."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_looped.modeling_looped import LoopedDecoderLayer

LENGTHS = [5, 9, 12, 7, 3, 12, 8, 10]
each_loss = pytest.mark.parametrize("skip_logits", [False, True])
each_injection = pytest.mark.parametrize(
    "injection", ["linear", "additive", "passthrough", "hyperconnections"]
)


def rows_of(lengths):
    """Rows of random tokens of different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(64, (n,), generator=generator)} for n in lengths]


def collate(rows):
    """One batch, padded on the right; padding is no target."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = labels[i, : len(row["input_ids"])] = row["input_ids"]
    return {"input_ids": ids, "labels": labels}


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def distance(actual, expected):
    """Largest difference of a parameter's gradient, relative to its norm."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected
    )


def mean_loss_gradients(model, rows):
    """Gradients of the mean loss over all targets of all rows, from the logits of each row alone."""
    model.zero_grad()
    losses = []
    for row in rows:
        logits = model(row["input_ids"][None], use_cache=False).logits[0, :-1]
        losses.append(-logits.log_softmax(-1).gather(1, row["input_ids"][1:, None]))
    torch.cat(losses).mean().backward()
    return gradients(model)


# Accumulated steps


@each_loss
def test_accumulated_parts_of_unequal_lengths_give_the_gradients_of_the_whole_batch(
    tiny_model, skip_logits
):
    """float32 sums in another order: 1e-5. A mean of the parts' means would be some 10 % off."""
    model = tiny_model(skip_logits=skip_logits).train()
    rows = rows_of(LENGTHS[:4])
    expected = mean_loss_gradients(model, rows)
    items = sum(LENGTHS[:4]) - 4

    model.zero_grad()
    model(**collate(rows), num_items_in_batch=items).loss.backward()
    assert distance(gradients(model), expected) < 1e-5
    for count in (items, torch.tensor(items)):
        model.zero_grad()
        for row in rows:
            model(**collate([row]), num_items_in_batch=count).loss.backward()
        assert distance(gradients(model), expected) < 1e-5

    model.zero_grad()
    for row in rows:
        (model(**collate([row])).loss / 4).backward()
    assert distance(gradients(model), expected) > 0.05


def fit(model, folder, rows, resume=None, **arguments):
    """Train with the Trainer; one batch of four rows a step unless said otherwise."""
    defaults = {
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **(defaults | arguments)),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(("size", "parts"), [(4, 1), (1, 4)])
@each_loss
def test_trainer_takes_the_same_step_whatever_the_accumulation(
    tiny_model, tmp_path, size, parts, skip_logits
):
    """Plain gradient descent on four rows: weights move by rate times the gradient of their mean loss."""
    model = tiny_model(skip_logits=skip_logits).train()
    rows = rows_of(LENGTHS[:4])
    expected = mean_loss_gradients(model, rows)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    fit(
        model,
        tmp_path,
        rows,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=parts,
        max_steps=1,
        optim="sgd",
        learning_rate=0.5,
        save_strategy="no",
    )
    moved = {
        name: (before[name] - weight.detach()) / 0.5 for name, weight in model.named_parameters()
    }
    assert distance(moved, expected) < 1e-4  # a weight of size 1 is stored with an error of 6e-8


def test_trainer_in_bfloat16_takes_the_step_of_float32_up_to_rounding(tiny_model, tmp_path):
    """Autocast has eight bits: 2^-8 an operation, about ten layers: 5 % of the whole gradient."""
    model = tiny_model(skip_logits=True, num_backprop_recurrences=2).train()
    rows = rows_of(LENGTHS[:4])
    expected = mean_loss_gradients(model, rows)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    rate = {"optim": "sgd", "learning_rate": 0.5}
    fit(model, tmp_path, rows, max_steps=1, bf16=True, save_strategy="no", **rate)
    moved = torch.cat(
        [(before[name] - weight).flatten() / 0.5 for name, weight in model.named_parameters()]
    )
    whole = torch.cat([gradient.flatten() for gradient in expected.values()])
    assert 1e-4 < (moved - whole).norm() / whole.norm() < 0.05


# The Trainer


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"injection": "hyperconnections", "tie_word_embeddings": True},
        {"state_init": "normal", "num_backprop_recurrences": 1, "skip_logits": True},
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_lowers_the_loss_and_resumes_to_the_same_weights(
    tiny_model, tmp_path, fields, checkpointing
):
    """Equal bits. Resumed after four of eight steps by a model of another seed, noise of the state included."""
    rows = rows_of(LENGTHS)
    common = {"activation_checkpointing": checkpointing, "max_steps": 8, "save_steps": 4}
    whole = tiny_model(**fields)
    history = fit(whole, tmp_path, rows, **common).state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert whole.is_activation_checkpointing == checkpointing

    resumed = tiny_model(seed=1, **fields)
    fit(resumed, tmp_path, rows, resume=str(tmp_path / "checkpoint-4"), **common)
    saved = type(whole).from_pretrained(tmp_path / "checkpoint-8")
    for (name, weight), other, third in zip(
        whole.named_parameters(), resumed.parameters(), saved.parameters(), strict=True
    ):
        assert torch.equal(weight, other) and torch.equal(weight, third), name


def test_trainer_evaluates_and_predicts_with_logits_and_without_caches(tiny_model, tmp_path):
    """Though the config skips logits in training."""
    model, rows = tiny_model(skip_logits=True), rows_of([12] * 4)
    trainer = fit(model, tmp_path, rows, max_steps=1, save_strategy="no")
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    predicted = torch.tensor(trainer.predict(rows).predictions)
    torch.testing.assert_close(predicted, logits, rtol=0, atol=1e-4)  # float32 logits up to 15


# Activation checkpointing


def count_layer_calls(model):
    calls = []
    for module in model.modules():
        if isinstance(module, LoopedDecoderLayer):
            module.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("r", [1, 2, 5])
@pytest.mark.parametrize(
    ("injection", "k"), [("linear", None), ("linear", 2), ("additive", 1), ("passthrough", None)]
)
def test_checkpointing_recomputes_what_is_differentiated_whatever_the_r_of_the_call(
    tiny_model, tokens, injection, k, r
):
    """The recomputation repeats the same operations: 1e-6. Layers of detached recurrences run once."""
    model = tiny_model(injection=injection, num_backprop_recurrences=k).train()
    ids, calls = tokens(), count_layer_calls(model)
    model(ids, labels=ids, num_recurrences=r).loss.backward()
    expected = gradients(model)
    assert len(calls) == 2 + 2 * r
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(ids, labels=ids, num_recurrences=r).loss.backward()
    differentiated = r if k is None else min(r, k)
    assert len(calls) == 2 * (2 + 2 * r) + 2 + 2 * differentiated
    assert distance(gradients(model), expected) < 1e-6


def test_checkpointing_starts_no_second_backward_pass(tiny_model, tokens):
    """The reentrant kind does, which DDP takes for parameters that are ready twice; autograd.grad refuses that kind."""
    model, ids = tiny_model().train(), tokens()
    model(ids, labels=ids).loss.backward()
    model.activation_checkpointing_enable()
    names, parameters = zip(*model.named_parameters(), strict=True)
    actual = torch.autograd.grad(model(ids, labels=ids).loss, parameters)
    assert distance(dict(zip(names, actual, strict=True)), gradients(model)) < 1e-6


# Caches


def test_no_cache_is_made_while_gradients_are_recorded_in_training(tiny_model, tokens):
    """r slots of keys and values would be kept for nothing. In eval mode, or without gradients, there is one."""
    model, ids = tiny_model(), tokens()
    for either in (model, model.model):
        assert either(ids).cache is not None
        assert either(ids, use_cache=False).cache is None
        either.train()
        assert either(ids).cache is None
        assert either(ids, use_cache=True).cache is None
        with torch.no_grad():
            assert either(ids, use_cache=True).cache is not None
        either.eval()


@each_injection
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_in_training_mode_generates_the_tokens_of_eval_mode(
    tiny_model, tokens, injection, checkpointing
):
    """Between two steps, say: no dropout here, so nothing differs. Truncation and checkpointing are about gradients."""
    k = 1 if injection in ("linear", "additive") else None
    model, ids = tiny_model(injection=injection, num_backprop_recurrences=k), tokens()
    new = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **new)
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
    with torch.no_grad():
        assert torch.equal(model.generate(ids, **new), expected)
