"""Operations with gradients by hand against the plain expressions, in float64, and the model with and without them."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from hf_looped import cpu_ops, modeling_looped

EPS = 1e-6
B, T, H, C = 2, 3, 2, 6
ANGLES = torch.linspace(0, 6, B * T * C // 2, dtype=torch.float64).view(B, T, 1, C // 2)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def random(*shape, seed=0, dtype=torch.float64):
    """Normal numbers to be differentiated."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(dtype).requires_grad_()


def error(actual, expected):
    """Norm of the difference relative to the norm of what is expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


# The operations: (by hand, plain), functions of tensors that are differentiated


def plain_rms_norm(x, weight):
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


def plain_rotary(x):
    """Pairs as complex numbers, turned by e^(i·angle)."""
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(COS, SIN)
    return torch.cat((turned.real, turned.imag), dim=-1).transpose(1, 2)


OPERATIONS = {
    "RMSNorm": (
        lambda x, weight: cpu_ops.RMSNorm.apply(x, weight, EPS),
        plain_rms_norm,
        ((B, T, C), (C,)),
    ),
    "RotaryNorm": (
        lambda x: cpu_ops.RotaryNorm.apply(x, COS, SIN, EPS),
        lambda x: plain_rms_norm(plain_rotary(x), 1.0),
        ((B, T, H, C),),
    ),
    "Rotary": (
        lambda x: cpu_ops.Rotary.apply(x, COS, SIN),
        plain_rotary,
        ((B, T, H, C),),
    ),
    "ReluSquared": (
        cpu_ops.ReluSquared.apply,
        lambda x: x.clamp(min=0) ** 2,
        ((B, T, C),),
    ),
}
each_operation = pytest.mark.parametrize("name", OPERATIONS)


@each_operation
def test_values_and_gradients_are_those_of_the_plain_expression(name):
    """Finite differences besides, of first and second order. 1e-12: float64's rounding, some tens of operations."""
    by_hand, plain, shapes = OPERATIONS[name]
    inputs = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    output, expected = by_hand(*inputs), plain(*inputs)
    above = random(*output.shape, seed=5).detach()
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for actual, wanted in zip(
        torch.autograd.grad(output, inputs, above),
        torch.autograd.grad(expected, inputs, above),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert gradcheck(by_hand, inputs)
    assert gradgradcheck(by_hand, inputs)


# torch says that its vmap takes operations in place one by one
slow_vmap = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@slow_vmap
@each_operation
def test_samples_can_be_differentiated_one_by_one_with_torch_func(name):
    by_hand, plain, shapes = OPERATIONS[name]
    inputs = [random(*shape, seed=i).detach() for i, shape in enumerate(shapes)]
    samples = torch.stack([inputs[0], 2 * inputs[0]])
    each = (0, *([None] * (len(inputs) - 1)))
    actual, expected = (
        vmap(grad(lambda *x, f=f: f(*x).sin().sum()), in_dims=each)(samples, *inputs[1:])
        for f in (by_hand, plain)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rms_norm_of_small_and_large_numbers(size):
    """ε matters at 1e-6, squares of 1e6 are large. Float32 against float64 of the same numbers: 1e-6."""
    x, weight = random(B, T, 64, dtype=torch.float32), random(64, seed=1, dtype=torch.float32)
    x = (size * x.detach()).requires_grad_()
    output = cpu_ops.RMSNorm.apply(x, weight, EPS)
    above = random(*output.shape, seed=5, dtype=torch.float32).detach()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = plain_rms_norm(*exact)
    assert error(output, expected) < 1e-6
    for actual, wanted in zip(
        torch.autograd.grad(output, (x, weight), above),
        torch.autograd.grad(expected, exact, above.double()),
        strict=True,
    ):
        assert error(actual, wanted) < 1e-6


def test_rms_norm_of_zeros_has_the_slope_one_over_root_eps():
    x = torch.zeros(1, 4, requires_grad=True)
    output = cpu_ops.RMSNorm.apply(x, torch.ones(4), EPS)
    (slope,) = torch.autograd.grad(output.sum(), x)
    assert (output == 0).all()
    torch.testing.assert_close(slope, torch.full((1, 4), EPS**-0.5))


# Products


@pytest.fixture(params=[False, True], ids=["casts", "multiplies-bf16"])
def hardware(request, monkeypatch):
    """A CPU without and with bfloat16 products; the latter is made up where the former runs the test."""
    monkeypatch.setattr(cpu_ops, "MULTIPLIES_BF16", request.param)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("rows", [1, 4, 50])
def test_bfloat16_products_are_rounded_once(rows):
    """Against float64 of the same numbers: half a unit of eight bits, 2^-9, is what rounding the result alone costs."""
    x = random(rows, 64, dtype=torch.bfloat16)
    weight = random(32, 64, seed=1, dtype=torch.bfloat16)
    output = cpu_ops.linear(x, weight)
    above = random(rows, 32, seed=2, dtype=torch.bfloat16).detach()
    gradients = torch.autograd.grad(output, (x, weight), above)
    expected = (
        x.double() @ weight.double().T,
        above.double() @ weight.double(),
        above.double().T @ x.double(),
    )
    for actual, wanted in zip((output, *gradients), expected, strict=True):
        assert actual.dtype == torch.bfloat16
        assert error(actual, wanted) < 2**-9
    with torch.no_grad():
        assert error(cpu_ops.linear(x, weight), expected[0]) < 2**-9


@pytest.mark.usefixtures("hardware")
def test_products_of_three_axes_frozen_weights_and_second_derivatives():
    x = random(B, T, 8, dtype=torch.bfloat16)
    weight = random(4, 8, seed=1, dtype=torch.bfloat16)
    (first,) = torch.autograd.grad(cpu_ops.linear(x, weight).sum(), x, create_graph=True)
    assert error(first, weight.double().sum(0).expand(B, T, 8)) < 2**-8
    (mixed,) = torch.autograd.grad(first.sum(), weight)
    assert error(mixed, torch.full((4, 8), B * T)) < 2**-8
    weight.requires_grad_(False)
    output = cpu_ops.linear(x, weight)
    assert output.shape == (B, T, 4)
    (alone,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(alone, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_products_are_torch_s_own(dtype):
    layer = cpu_ops.Linear(8, 4, bias=False, dtype=dtype)
    x = random(5, 8, dtype=dtype)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


# Attention


def plain_attention(query, key, value, scaling):
    length = query.shape[2]
    ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(ahead, float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 4, 5, 8, 11])
def test_attention_in_blocks_is_masked_attention(monkeypatch, length):
    """Blocks of four queries; float64 is kept where the hardware multiplies the dtype as it is."""
    monkeypatch.setattr(cpu_ops, "MULTIPLIES_BF16", True)
    monkeypatch.setattr(cpu_ops, "BLOCK", 4)
    inputs = [random(1, H, length, 4, seed=i) for i in range(3)]

    def by_hand(*qkv):
        return cpu_ops.causal_attention(*qkv, 0.3)

    output, expected = by_hand(*inputs), plain_attention(*inputs, 0.3)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert gradcheck(by_hand, inputs)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("length", [2, 128, 200, 300])
def test_attention_in_bfloat16_is_as_precise_as_the_fused_kernel(length):
    """Both against float64 of the same numbers, values and gradients.

    Weights are rounded to bfloat16 before they are multiplied where the hardware does that: an error as large as that
    of the result, so twice the kernel's at most.
    """
    inputs = [random(1, 2, length, 16, seed=i, dtype=torch.bfloat16) for i in range(3)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    above = random(1, length, 2, 16, seed=5, dtype=torch.bfloat16).detach()
    expected = plain_attention(*exact, 0.25)
    wanted = (expected, *torch.autograd.grad(expected, exact, above.double()))
    errors = []
    for output in (
        cpu_ops.causal_attention(*inputs, 0.25),
        scaled_dot_product_attention(*inputs, is_causal=True, scale=0.25).transpose(1, 2),
    ):
        assert output.dtype == torch.bfloat16
        found = (output, *torch.autograd.grad(output, inputs, above))
        errors.append([error(a, w) for a, w in zip(found, wanted, strict=True)])
    for of_blocks, of_kernel in zip(*errors, strict=True):
        assert of_blocks <= 2 * of_kernel < 0.02


def test_attention_refuses_to_be_differentiated_twice():
    inputs = [random(1, 2, 5, 4, seed=i) for i in range(3)]
    output = cpu_ops.causal_attention(*inputs, 0.5)
    with pytest.raises(RuntimeError, match="twice; use attn_implementation='eager'"):
        torch.autograd.grad(output.sum(), inputs, create_graph=True)


# When they are used


def test_only_what_is_differentiated_on_a_cpu_by_no_compiler_counts(monkeypatch):
    x = random(2)
    assert cpu_ops.differentiates_on_cpu(x)
    assert not cpu_ops.differentiates_on_cpu(x.to("meta"))
    with torch.no_grad():
        assert not cpu_ops.differentiates_on_cpu(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not cpu_ops.differentiates_on_cpu(x)


def test_blocks_are_for_long_enough_unmasked_rows_of_bfloat16():
    def prefers(queries=8, keys=8, dtype=torch.bfloat16, mask=None):
        shapes = ((1, 2, queries, 4), (1, 2, keys, 4))
        return cpu_ops.prefers_blocks(*(torch.zeros(s, dtype=dtype) for s in shapes), mask)

    assert prefers() and prefers(2, 2) and prefers(1024, 1024)
    assert not prefers(1, 1) and not prefers(1025, 1025)
    assert not prefers(queries=1) and not prefers(keys=9)  # a cache holds more
    assert not prefers(dtype=torch.float32)
    assert not prefers(mask=torch.zeros(1, 1, 8, 8))
    with torch.no_grad():
        assert not prefers()


@pytest.fixture
def attentions(monkeypatch):
    """Count calls of the attention in blocks."""
    calls, inner = [], modeling_looped.causal_attention

    def counting(*args):
        calls.append(1)
        return inner(*args)

    monkeypatch.setattr(modeling_looped, "causal_attention", counting)
    return calls


def test_the_model_attends_in_blocks_where_nothing_asks_for_another_attention(
    tiny_model, tokens, attentions
):
    ids = tokens()
    packed = torch.tensor([[*range(5), *range(7)]])
    padded = torch.ones_like(ids)
    padded[0, :3] = 0

    def used(attention="sdpa", dtype=torch.bfloat16, training=True, fields=None, **kwargs):
        attentions.clear()
        tiny_model(attention, **(fields or {})).to(dtype).train(training)(ids, **kwargs)
        return len(attentions)

    assert used() == 1 + 2 * 3 + 1
    assert used(training=False, use_cache=False) == 8  # gradients in eval mode
    assert used("eager") == 0
    assert used(dtype=torch.float32) == 0
    assert used(position_ids=packed) == 0
    assert used(attention_mask=padded) == 0
    assert used(fields={"attention_dropout": 0.1}) == 0
    with torch.no_grad():
        assert used() == 0


# The model


def gradients(model, ids, **kwargs):
    model.zero_grad()
    output = model(ids, labels=ids, use_cache=False, **kwargs)
    output.loss.backward()
    whole = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    return SimpleNamespace(logits=output.logits, loss=output.loss, whole=whole)


@pytest.fixture
def plainly(monkeypatch):
    """Switch the operations by hand off."""

    def switch():
        for module in (cpu_ops, modeling_looped):
            monkeypatch.setattr(module, "differentiates_on_cpu", lambda x: False)

    return switch


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"injection": "additive", "num_backprop_recurrences": 1},
        {"injection": "passthrough", "hidden_act": "gelu"},
        {"injection": "hyperconnections"},
        {"qk_norm": False, "gated_mlp": True},
        {"recurrent_norm": False, "embedding_norm": False, "residual_multiplier": 0.25},
    ],
)
def test_gradients_of_the_model_are_those_of_the_plain_operations(
    tiny_model, tokens, plainly, attention, fields
):
    """float32 sums in another order: 1e-5 of the whole gradient; logits up to 15, 1e-4."""
    model, ids = tiny_model(attention, **fields).train(), tokens()
    by_hand = gradients(model, ids)
    plainly()
    plain = gradients(model, ids)
    torch.testing.assert_close(by_hand.logits, plain.logits, rtol=0, atol=1e-4)
    assert error(by_hand.whole, plain.whole) < 1e-5
    assert not torch.equal(by_hand.whole, plain.whole)  # they are different operations


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize("length", [12, 200])
def test_a_step_in_bfloat16_is_as_precise_as_with_the_plain_operations(
    tiny_model, tokens, plainly, precision, length
):
    """Distance from float32's gradient, grouped queries, more and less than a block; rounding may differ by a half."""
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 200}
    model, ids = tiny_model(**fields).train(), tokens(length=length)
    expected = gradients(model, ids).whole
    if precision == "bfloat16":
        model.bfloat16()
    errors = []
    for switch in (lambda: None, plainly):
        switch()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            errors.append(error(gradients(model, ids).whole, expected))
    assert errors[0] <= 1.5 * errors[1] < 0.1


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("low", [False, True])
def test_it_does_not_matter_whether_backward_runs_inside_of_autocast(tiny_model, tokens, low):
    """A script may put the whole step into it. What was a float32 operation forward stays one backward: equal bits."""
    model, ids = tiny_model().train(), tokens()
    if low:
        model.bfloat16()
    results = []
    for inside in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, skip_logits=True).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    for (name, _), outside, within in zip(model.named_parameters(), *results, strict=True):
        assert torch.equal(outside, within), name


@slow_vmap
def test_torch_func_differentiates_the_model_for_each_sample_with_eager_attention(
    tiny_model, tokens
):
    """Gradients of rows one by one, from backward; 1e-5: sums in another order."""
    model, ids = tiny_model("eager").train(), tokens(rows=3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, row):
        logits = functional_call(model, parameters, (row[None],), {"use_cache": False}).logits
        return cross_entropy(logits[0, :-1], row[1:])

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, ids)
    for i, row in enumerate(ids):
        model.zero_grad()
        model(row[None], labels=row[None]).loss.backward()
        for name, parameter in model.named_parameters():
            assert error(each[name][i], parameter.grad) < 1e-5, name


def test_second_derivatives_of_the_model_are_those_of_the_plain_operations(
    tiny_model, tokens, plainly
):
    """Gradient of the squared gradient norm of a float32 model: 5e-4, since products of two derivatives are summed."""
    model, ids = tiny_model("eager").train(), tokens()
    weights, results = list(model.parameters()), []
    for switch in (lambda: None, plainly):
        switch()
        loss = model(ids, labels=ids, use_cache=False).loss
        first = torch.autograd.grad(loss, weights, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), weights)
        results.append(torch.cat([g.flatten() for g in second]))
    assert error(*results) < 5e-4
