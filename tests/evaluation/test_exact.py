"""Losses, counts and accuracies equal a direct computation that shares no code with the package."""

import math

import pytest
import torch

from evaluation.run import load_task, run_task, settings_of


def ours(lm, data, task, **options):
    settings = settings_of(task, data, options.get("limit"), options.get("mc_rule"))
    return run_task(lm, load_task(task, data, options.get("mc_rule")), settings)


def direct(tools, model, tokenizer, data, task, shots, rule="shared_prefix"):
    """Loss, tokens and accuracy of a task, document by document."""
    nats, tokens, right, raw, size = [], 0, [], [], 0
    documents = tools.documents(data / f"{task}.jsonl", shots)
    for prompt, row in documents:
        if "choices" not in row:
            losses, ids, greedy = tools.losses(model, tokenizer, prompt, row["continuation"])
            right.append(all(greedy))
            raw.append(sum(losses))
            size += len(f" {row['continuation']}".encode())
        else:
            scores = [tools.losses(model, tokenizer, prompt, one) for one in row["choices"]]
            skip = 0
            if rule == "shared_prefix":
                lists = [ids for _, ids, _ in scores]
                while (
                    all(len(ids) > skip + 1 for ids in lists)
                    and len({ids[skip] for ids in lists}) == 1
                ):
                    skip += 1
            means = [sum(losses[skip:]) / len(losses[skip:]) for losses, _, _ in scores]
            right.append(means.index(min(means)) == row["gold"])
            losses, ids, _ = scores[row["gold"]]
            raw.append(sum(losses))
            losses, ids = losses[skip:], ids[skip:]
            size += len(f" {row['choices'][row['gold']]}".encode())
        nats.append(sum(losses))
        tokens += len(ids)
    return {
        "loss": sum(nats) / tokens,
        "tokens": tokens,
        "accuracy": sum(right) / len(right),
        "bits_per_byte": sum(raw) / math.log(2) / size,
    }


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize(("task", "shots"), [("svamp", 5), ("lambada_openai", 0), ("arc_easy", 10)])
@pytest.mark.parametrize("kind", ["llama", "looped"])
def test_losses_and_counts_are_those_of_a_direct_computation(
    tools, request, tokenizer, data, task, shots, kind, batch_size
):
    """float32 forward passes in other batches: 1e-6 nats."""
    model = request.getfixturevalue(kind)
    found = ours(tools.loaded(model, tokenizer, batch_size=batch_size), data, task)
    expected = direct(tools, model, tokenizer, data, task, shots)
    assert found["tokens"] == expected["tokens"]
    assert found["accuracy"] == expected["accuracy"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-6)
    assert found["documents"] == 40 and found["truncated"] == 0


@pytest.mark.parametrize("task", ["svamp", "arc_easy"])
def test_in_float64_only_rounding_is_left(tools, byte_tokenizer, data, task):
    model = tools.make_llama(dtype=torch.float64)
    found = ours(tools.loaded(model, byte_tokenizer), data, task)
    expected = direct(tools, model, byte_tokenizer, data, task, {"svamp": 5, "arc_easy": 10}[task])
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)


def test_the_two_rules_of_multiple_choice(tools, llama, byte_tokenizer, data):
    """The choices of these rows share their first words, so that the rules differ."""
    lm = tools.loaded(llama, byte_tokenizer)
    for rule in ("whole", "shared_prefix"):
        found = ours(lm, data, "arc_easy", mc_rule=rule)
        expected = direct(tools, llama, byte_tokenizer, data, "arc_easy", 10, rule)
        assert found["mc_rule"] == rule
        assert found["tokens"] == expected["tokens"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_recurrences_of_a_looped_model(tools, byte_tokenizer, data):
    model = tools.make_looped()
    losses = {}
    for r in (1, 2, 4):
        lm = tools.loaded(model, byte_tokenizer, num_recurrences=r)
        assert lm.key.endswith(f"r = {r}")
        losses[r] = ours(lm, data, "svamp")["loss"]
        nats, tokens = 0.0, 0
        for prompt, row in tools.documents(data / "svamp.jsonl", 5):
            one, ids, _ = tools.losses(
                model, byte_tokenizer, prompt, row["continuation"], num_recurrences=r
            )
            nats, tokens = nats + sum(one), tokens + len(ids)
        assert losses[r] == pytest.approx(nats / tokens, rel=1e-6)
    assert len(set(losses.values())) == 3


def test_softmax_is_float32_whatever_the_models_dtype(tools, byte_tokenizer, data):
    """A bfloat16 model's logits, log-softmax in float32: 0.02 nats from bfloat16 products in other batches."""
    model = tools.make_llama(dtype=torch.bfloat16)
    found = ours(tools.loaded(model, byte_tokenizer), data, "lambada_openai")
    expected = direct(tools, model, byte_tokenizer, data, "lambada_openai", 0)
    assert found["dtype"] == "bfloat16"
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.02)


def test_prompts_that_were_cut_are_counted_and_warned_of(tools, llama, byte_tokenizer, data):
    lm = tools.loaded(llama, byte_tokenizer, max_length=64)
    with pytest.warns(UserWarning, match="looped_svamp: 40 of 40 prompts were cut.*--max-length"):
        found = ours(lm, data, "svamp")
    assert found["truncated"] == 40 and found["max_length"] == 64


def test_scoring_needs_no_network(tools, llama, byte_tokenizer, data, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert ours(tools.loaded(llama, byte_tokenizer), data, "arc_easy", limit=4)["documents"] == 4
