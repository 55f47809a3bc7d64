"""LoRA adapters from PEFT on the looped model: one adapter of a shared layer serves all recurrences."""

import copy

import pytest
import torch

peft = pytest.importorskip("peft", reason="needs peft (the dev extra)")

# PEFT asks the model by a name that Transformers has renamed
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
MODELS = {
    "linear": {},
    "hyperconnections": {"injection": "hyperconnections"},
    "truncated": {"num_backprop_recurrences": 1, "skip_logits": True},
    "tied": {"tie_word_embeddings": True},
}
ATTENTION = ["q_proj", "v_proj"]
NEW = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **kwargs).logits


def train(model, ids, steps=5):
    """Losses of a few steps; every trainable weight must get a gradient."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(weight.grad is not None for weight in weights)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def adapted(model):
    """Names of the modules that have an adapter, without PEFT's prefix."""
    names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    return {name.removeprefix("base_model.model.").split(".lora_A")[0] for name in names}


@pytest.mark.parametrize("target", [ATTENTION, "all-linear"], ids=["attention", "all-linear"])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_lora_trains_saves_and_merges(tiny_model, tokens, tmp_path, fields, target):
    """Merged weights are added before they are multiplied, sums of another order: 1e-4 of logits up to 15."""
    base, ids = tiny_model(**fields), tokens()
    untouched, before = copy.deepcopy(base), logits(base, ids)
    config = peft.LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    expected = {
        name
        for name, module in untouched.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
        if target == "all-linear" or name.split(".")[-1] in ATTENTION
    }
    assert adapted(model) == expected and len(expected) == 4 * (2 if target == ATTENTION else 6) + (
        target == "all-linear" and "injection" not in fields
    )
    assert torch.equal(logits(model, ids), before)  # B is zero at first
    losses = train(model, ids)
    assert losses[-1] < losses[0] - 0.3
    after, generated = logits(model, ids), model.generate(input_ids=ids, **NEW)
    fewer = logits(model, ids, num_recurrences=1)
    assert (after - before).abs().max() > 0.1

    model.save_pretrained(tmp_path)
    reloaded = peft.PeftModel.from_pretrained(untouched, tmp_path).eval()
    assert torch.equal(logits(reloaded, ids), after)

    merged = model.merge_and_unload()
    assert type(merged) is type(base) and not adapted(merged)
    torch.testing.assert_close(logits(merged, ids), after, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(merged, ids, num_recurrences=1), fewer, rtol=0, atol=1e-4)
    assert torch.equal(merged.generate(ids, **NEW), generated)


def test_lora_gradients_are_the_weight_s_gradient_seen_through_the_adapter(tiny_model, tokens):
    """W + s·B·A with B = 0: ∂B = s·∂W·Aᵀ, where ∂W is the model's without adapter, summed over recurrences; 1e-5."""
    plain, ids = tiny_model().train(), tokens()
    plain(ids, labels=ids).loss.backward()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(), config).train()
    model(input_ids=ids, labels=ids).loss.backward()
    layers = (plain.model.recurrent, model.base_model.model.model.recurrent)
    for without, with_adapter in zip(*layers, strict=True):
        adapter = with_adapter.self_attn.q_proj
        a, b = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
        expected = 8 / 4 * without.self_attn.q_proj.weight.grad @ a.T
        assert (b.grad - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize(
    "where", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}], ids="-".join
)
def test_an_adapted_head_still_trains_where_logits_are_skipped(tiny_model, tokens, where):
    """The loss without logits knows a plain head only: it takes them, and drops them after."""
    fields = {"target_modules": ATTENTION} | where
    base, ids = tiny_model(skip_logits=True), tokens()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **fields))
    losses = train(model, ids)
    assert losses[-1] < losses[0] - 0.1
    model.train()
    chunked = model(input_ids=ids, labels=ids)
    plain = model(input_ids=ids, labels=ids, skip_logits=False)
    assert chunked.logits is None and plain.logits is not None
    assert chunked.loss.item() == plain.loss.item()
    model.eval()
    after = logits(model, ids)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), after, rtol=0, atol=1e-4)


def test_lora_trains_with_activation_checkpointing(tiny_model, tokens):
    """Though the embedding is frozen: the first layer's input needs no gradient. The same operations: 1e-6."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    ids, results = tokens(), []
    for checkpointing in (False, True):
        base = tiny_model(num_backprop_recurrences=2)
        if checkpointing:
            base.activation_checkpointing_enable()
        torch.manual_seed(3)  # of the adapter's A
        model = peft.get_peft_model(base, config).train()
        model(input_ids=ids, labels=ids).loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, gradient in results[0].items():
        assert (results[1][name] - gradient).norm() <= 1e-6 * gradient.norm(), name
