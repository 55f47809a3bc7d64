"""The model against the paper's reference implementation, and against a forward written as nested loops."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.modeling_looped import position_noise

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
CASES = ["r1_unlooped", "r4_linear", "r4_hyperconnections"]
INJECTIONS = {
    "passthrough": "passthrough",
    "inject_init_prelude": "linear",
    "hyperconnect": "hyperconnections",
}
HEAD = 16


def other_rotation(name, weight):
    """Negate the rows of W_q and W_k that make the second half of each head: the reference rotates by −θ."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = weight.clone().view(-1, HEAD, weight.shape[-1])
    heads[:, HEAD // 2 :] *= -1
    return heads.view_as(weight)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    if not REFERENCE.is_dir():
        pytest.skip("the reference numbers (shared/reference beside the repository) are not here")
    meta = json.loads((REFERENCE / "meta.json").read_text())[request.param]
    tensors = load_file(REFERENCE / f"{request.param}.safetensors")
    config = LoopedConfig(
        vocab_size=meta["vocab"],
        hidden_size=meta["n_embd"],
        num_attention_heads=meta["n_head"],
        num_key_value_heads=meta["n_kv_head"],
        num_prelude_layers=meta["n_prelude"],
        num_recurrent_layers=meta["n_recur_block"],
        num_coda_layers=meta["n_coda"],
        num_recurrences=meta["num_recur"],
        injection=INJECTIONS[meta["input_injection"]],
        num_lanes=meta.get("num_lanes", 2),
    )
    return config, tensors


def section(tensors, prefix):
    return {
        name.removeprefix(prefix): other_rotation(name, tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def reference_model(case, attention):
    config, tensors = case
    config._attn_implementation = attention
    model = LoopedForCausalLM(config)
    model.load_state_dict(section(tensors, "in."))
    return model, tensors["x"].long(), tensors["y"].long().masked_fill(tensors["y"] == -1, -100)


def test_parameter_names_and_shapes_are_those_of_the_reference(case):
    config, tensors = case
    expected = {name: tensor.shape for name, tensor in section(tensors, "in.").items()}
    actual = {name: p.shape for name, p in LoopedForCausalLM(config).named_parameters()}
    assert actual == expected


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_and_loss_are_those_of_the_reference(case, attention):
    """Logits reach 15; float32 has seven digits and eighteen layers of rounding lie between: 1e-4 and 1e-5."""
    model, x, y = reference_model(case, attention)
    output = model(x, shift_labels=y, use_cache=False)
    torch.testing.assert_close(output.logits, case[1]["logits"], rtol=0, atol=1e-4)
    assert output.loss.item() == pytest.approx(case[1]["loss"].item(), abs=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_gradient_is_that_of_the_reference(case, attention):
    """1e-4 of the gradient's norm: float32 sums of 48 tokens in another order."""
    model, x, y = reference_model(case, attention)
    model(x, shift_labels=y, use_cache=False).loss.backward()
    expected = section(case[1], "grad.")
    actual = {name: p.grad for name, p in model.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0
        assert (actual[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


# A second reading of section 3.1 and Table 4 that shares no code with the model: scalars and vectors, one token, one
# head and one recurrence at a time, in float64.


def norm(x, gain=None, eps=1e-6):
    y = x / math.sqrt(float((x * x).mean()) + eps)
    return y if gain is None else y * gain


def turn(x, position):
    half = len(x) // 2
    y = x.clone()
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(x))
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return y


def block(weights, prefix, xs, c):
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads

    def unit(x):
        return norm(x) if c.qk_norm else x

    def w(name):
        return weights[f"{prefix}.{name}.weight"]

    normed = [norm(x, w("input_layernorm")) for x in xs]
    size = len(w("self_attn.q_proj")) // heads
    after = []
    for t in range(len(xs)):
        out = []
        for head in range(heads):
            rows = slice(head * size, (head + 1) * size)
            group = head * kv_heads // heads
            kv_rows = slice(group * size, (group + 1) * size)
            query = unit(turn(w("self_attn.q_proj")[rows] @ normed[t], t))
            scores = []
            for s in range(t + 1):
                key = unit(turn(w("self_attn.k_proj")[kv_rows] @ normed[s], s))
                scores.append(math.exp(float(query @ key) / math.sqrt(size)))
            values = [w("self_attn.v_proj")[kv_rows] @ normed[s] for s in range(t + 1)]
            out.append(sum(p * v for p, v in zip(scores, values, strict=True)) / sum(scores))
        x = xs[t] + c.residual_multiplier * (w("self_attn.o_proj") @ torch.cat(out))
        read = norm(x, w("post_attention_layernorm"))
        hidden = w("mlp.up_proj") @ read
        if c.gated_mlp:
            gate = w("mlp.gate_proj") @ read
            hidden = hidden * gate / (1 + torch.exp(-gate))
        else:
            hidden = hidden.clamp(min=0) ** 2
        after.append(x + c.residual_multiplier * (w("mlp.down_proj") @ hidden))
    return after


def naive_logits(model, row, initial):
    """Logits [T, V] of one row; `initial` gives h(0) of every token from the prelude's outputs."""
    c = model.config
    weights = {name: p.detach().double() for name, p in model.named_parameters()}

    def run(name, layers, xs):
        for i in range(layers):
            prefix = f"model.{name}.{i}"
            xs = block(weights, prefix, xs, c)
        return xs

    xs = [weights["model.embed_tokens.weight"][t] for t in row]
    if c.embedding_norm:
        xs = [norm(x, weights["model.embed_norm.weight"]) for x in xs]
    es = run("prelude", c.num_prelude_layers, xs)
    hs = initial(es)
    lanes = [[h] * c.num_lanes for h in hs]
    for t in range(c.num_recurrences):
        if c.injection == "linear":
            matrix = weights["model.injection.proj.weight"]
            us = [matrix @ torch.cat((e, h)) for e, h in zip(es, hs, strict=True)]
        elif c.injection == "additive":
            us = [h + e for e, h in zip(es, hs, strict=True)]
        elif c.injection == "passthrough":
            us = hs
        else:
            alpha = weights["model.injection.alpha"][t]
            us = [sum(alpha[k] * lane[k] for k in range(c.num_lanes)) for lane in lanes]
        hs = run("recurrent", c.num_recurrent_layers, us)
        if c.recurrent_norm:
            hs = [norm(h, weights["model.recurrent_norm.weight"]) for h in hs]
        if c.injection == "hyperconnections":
            mixing, beta = weights["model.injection.mixing"][t], weights["model.injection.beta"][t]
            lanes = [
                [
                    sum(mixing[j, k] * lane[k] for k in range(c.num_lanes)) + beta[j] * s
                    for j in range(c.num_lanes)
                ]
                for lane, s in zip(lanes, hs, strict=True)
            ]
    if c.injection == "hyperconnections":
        hs = [sum(lane) for lane in lanes]
    ys = run("coda", c.num_coda_layers, hs)
    raw = [weights["lm_head.weight"] @ norm(y, weights["model.norm.weight"]) for y in ys]
    return torch.stack([15 * torch.tanh(x / 15) for x in raw])


@pytest.mark.parametrize(
    ("injection", "state_init"),
    [
        *((i, s) for i in ("linear", "additive") for s in ("auto", "prelude", "zeros", "normal")),
        ("passthrough", "auto"),
        ("hyperconnections", "auto"),
    ],
)
def test_logits_are_those_of_a_naive_loop_over_tokens_heads_and_recurrences(
    tiny_model, tokens, injection, state_init
):
    """The model's norms and logits are float32 in a float64 model too (rounding 1e-7 on logits up to 15): 3e-5."""
    model = tiny_model(
        injection=injection,
        state_init=state_init,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_recurrences=2,
        num_lanes=3,
        state_seed=5,
    ).double()
    row = tokens(rows=1, length=5)
    zeros = state_init == "zeros" or (state_init == "auto" and injection == "additive")

    def initial(es):
        if zeros:
            return [torch.zeros_like(e) for e in es]
        if state_init == "normal":
            return list(position_noise(torch.arange(5)[None], 32, seed=5)[0].double())
        return es

    with torch.no_grad():
        actual = model(row, use_cache=False).logits[0].double()
        expected = naive_logits(model, row[0], initial)
    assert expected.std() > 0.5  # the logits differ by far more than the tolerance
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-5)


OPTIONS = {
    "gated_mlp": {"gated_mlp": True, "hidden_act": "silu", "intermediate_size": 48},
    "qk_norm": {"qk_norm": False},
    "embedding_norm": {"embedding_norm": False},
    "recurrent_norm": {"recurrent_norm": False},
    "residual_multiplier": {"residual_multiplier": 0.25},
}


@pytest.mark.parametrize("injection", ["linear", "additive", "passthrough", "hyperconnections"])
@pytest.mark.parametrize("option", [*OPTIONS, "all"])
def test_logits_with_an_option_are_those_of_the_naive_loop(tiny_model, tokens, option, injection):
    """Tolerance as above. The model differentiates nothing and then everything: both ways through cpu_ops."""
    fields = {}
    for name in OPTIONS if option == "all" else (option,):
        fields |= OPTIONS[name]
    model = tiny_model(injection=injection, num_recurrences=2, **fields).double()
    row = tokens(rows=1, length=5)

    def initial(es):
        return [torch.zeros_like(e) for e in es] if injection == "additive" else es

    expected = naive_logits(model, row[0], initial)
    assert expected.std() > 0.5
    for differentiated in (False, True):
        with torch.set_grad_enabled(differentiated):
            actual = model(row, use_cache=False).logits[0].double()
        torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=3e-5)
