"""The options that a retrofitted model needs (gated MLP, norms left out, residual multiplier).

The referees are Llama and Granite of Transformers; test_reference.py has a naive loop over every option alone.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_looped import LoopedConfig, LoopedForCausalLM

LLAMA_LIKE = {
    **dict.fromkeys(("qk_norm", "embedding_norm", "recurrent_norm"), False),
    "gated_mlp": True,
    "hidden_act": "silu",
    "final_logit_softcapping": None,
}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not 32 / 4
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
REFEREES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}, {}),
    "llama3-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": LLAMA3},
        {"rope_parameters": LLAMA3},
    ),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {"attention_multiplier": 12**-0.5, "residual_multiplier": 0.3},
        {"residual_multiplier": 0.3},
    ),
}
SECTIONS = ("prelude.0", "recurrent.0", "recurrent.1", "coda.0")  # of the referee's layers 0 … 3


def name_in_referee(name):
    for layer, section in enumerate(SECTIONS):
        name = name.replace(f"model.{section}.", f"model.layers.{layer}.")
    return name


@pytest.fixture(params=[(name, tied) for name in REFEREES for tied in (False, True)], ids=str)
def pair(request):
    """A referee of four layers with weights of size one, and the looped model that has the same."""
    name, tied = request.param
    config_class, model_class, theirs, ours = REFEREES[name]
    torch.manual_seed(0)
    referee = model_class(
        config_class(**SHAPE, **theirs, num_hidden_layers=4, tie_word_embeddings=tied)
    )
    with torch.no_grad():
        for parameter in referee.parameters():
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.add_(torch.randn_like(parameter) / fan_in**0.5)
    looped = LoopedForCausalLM(
        LoopedConfig(
            **SHAPE,
            **LLAMA_LIKE,
            **ours,
            tie_word_embeddings=tied,
            num_prelude_layers=1,
            num_recurrent_layers=2,
            num_coda_layers=1,
            num_recurrences=1,
            injection="passthrough",
        )
    )
    weights = referee.state_dict()
    looped.load_state_dict({n: weights[name_in_referee(n)] for n in looped.state_dict()})
    return referee, looped


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_block_run_once_is_the_unlooped_model_of_transformers(pair, tokens, attention):
    """Logits of size one after four layers, float32: 1e-5; gradients 1e-5 of their norm. Padding on the left."""
    referee, looped = pair
    ids = tokens(length=20)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    results = []
    for model in (referee, looped):
        model.set_attn_implementation(attention)
        model.train()
        output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        results.append((output.logits[mask == 1], output.loss))
    (expected, loss), (actual, our_loss) = results
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    gradients = {name: p.grad for name, p in referee.named_parameters()}
    named = dict(looped.named_parameters())
    assert len(named) == len(gradients)
    for name, parameter in named.items():
        gradient = gradients[name_in_referee(name)]
        assert gradient.norm() > 0
        assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_the_unlooped_model_of_transformers_decodes_the_same_tokens(pair, tokens):
    referee, looped = pair
    written = [
        model.eval().generate(
            tokens(), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        for model in (referee, looped)
    ]
    assert torch.equal(*written)


LOOPED = {**LLAMA_LIKE, "residual_multiplier": 0.5, "num_key_value_heads": 1}


@pytest.mark.parametrize("injection", ["linear", "additive", "passthrough", "hyperconnections"])
def test_greedy_tokens_of_a_looped_model_don_t_depend_on_the_cache(tiny_model, tokens, injection):
    """A cache of all recurrences and none at all; equal tokens, not close logits."""
    model = tiny_model(injection=injection, **LOOPED)
    generation = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    for r in (1, 2, 3):
        cached, uncached = (
            model.generate(tokens(), num_recurrences=r, use_cache=use, **generation)
            for use in (True, False)
        )
        assert torch.equal(cached, uncached)


def step(model, ids, **kwargs):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False, **kwargs).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten().clone() for p in model.parameters()])


def test_checkpointing_and_the_chunked_loss_give_the_same_step(tiny_model, tokens):
    """Checkpointing repeats the same operations, equal bits; chunks sum in another order, 1e-5."""
    model, ids = tiny_model(**LOOPED).train(), tokens()
    loss, gradient = step(model, ids)
    chunked_loss, chunked_gradient = step(model, ids, skip_logits=True)
    assert chunked_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert (chunked_gradient - gradient).norm() <= 1e-5 * gradient.norm()
    model.activation_checkpointing_enable()
    checkpointed_loss, checkpointed_gradient = step(model, ids)
    assert torch.equal(checkpointed_loss, loss) and torch.equal(checkpointed_gradient, gradient)


def test_a_saved_model_with_every_option_comes_back_bit_for_bit(tiny_model, tokens, tmp_path):
    model = tiny_model(**LOOPED)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = model.state_dict()
    assert loaded.state_dict().keys() == weights.keys()
    assert not [name for name in weights if "embed_norm" in name or "recurrent_norm" in name]
    with torch.no_grad():
        logits = [m(tokens(), use_cache=False).logits for m in (model, loaded)]
    assert torch.equal(*logits)


def test_the_options_are_off_by_default(tiny_model):
    """Checkpoints without the options' fields keep their parameters and their function."""
    model = tiny_model()
    names = model.state_dict().keys()
    assert {"model.embed_norm.weight", "model.recurrent_norm.weight"} <= names
    assert not [name for name in names if "gate" in name]


@pytest.mark.parametrize("gated", [False, True])
def test_tensor_parallelism_splits_every_matrix_of_a_block_and_names_no_other(tiny_model, gated):
    model = tiny_model(gated_mlp=gated)
    matrices = {
        name.removesuffix(".weight") for name in model.model.state_dict() if "_proj" in name
    }
    planned = {name.replace("*", "0") for name in model.config.base_model_tp_plan}
    assert planned == {name.replace(".1.", ".0.") for name in matrices}
