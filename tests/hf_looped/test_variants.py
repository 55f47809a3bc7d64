"""Variants of the loop against a naive loop and closed forms: diagonal injection, adapters, time, exit gate."""

import math

import pytest
import torch

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.adapters import AdaptedLinear
from hf_looped.objectives import exit_log_probabilities

ROUNDING = {
    "rtol": 0,
    "atol": 2e-4,
}  # float32 logits up to 15 after up to some twenty layers, against float64
VARIANTS = {
    "diagonal": {"injection": "diagonal"},
    "diagonal, random state": {"injection": "diagonal", "state_init": "normal"},
    "adapters": {"adapter_rank": 3},
    "adapters, grouped queries": {
        "adapter_rank": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "adapters, hyperconnections": {"adapter_rank": 1, "injection": "hyperconnections"},
    "time": {"time_conditioning": True},
    "time, passthrough": {"time_conditioning": True, "injection": "passthrough"},
    "gate": {"exit_gate": True},
    "fully looped": {"num_prelude_layers": 0, "num_coda_layers": 0},
    "mostly unshared": {"num_prelude_layers": 3, "num_recurrent_layers": 1, "num_coda_layers": 2},
    "all": {
        "injection": "diagonal",
        "adapter_rank": 2,
        "time_conditioning": True,
        "exit_gate": True,
    },
}
each_variant = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)


@pytest.mark.parametrize("r", [1, 2, 3])
@each_variant
def test_logits_are_those_of_the_naive_loop_with_and_without_cache(
    naive, tiny_model, tokens, fields, r
):
    model = tiny_model(**fields)
    expected, _ = naive.logits(model, tokens(), [12], r)
    with torch.no_grad():
        whole = model(tokens(), num_recurrences=r, use_cache=False).logits
        first = model(tokens()[:, :7], num_recurrences=r, use_cache=True)
        rest = model(tokens()[:, 7:], num_recurrences=r, cache=first.cache).logits
    torch.testing.assert_close(whole, expected, **ROUNDING)
    torch.testing.assert_close(torch.cat((first.logits, rest), dim=1), expected, **ROUNDING)


@each_variant
def test_weights_come_back_bit_for_bit_and_all_of_them_train(tiny_model, tokens, tmp_path, fields):
    model = tiny_model(**fields)
    model.save_pretrained(tmp_path)
    loaded = LoopedForCausalLM.from_pretrained(tmp_path)
    for name, parameter in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name
    shortcut = {"shortcut_recurrences": 2} if model.config.time_conditioning else {}
    if model.config.exit_gate:
        shortcut = {}
    model.train()(tokens(), labels=tokens(), **shortcut).loss.backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still


@each_variant
def test_gradient_checkpointing_changes_no_gradient(tiny_model, tokens, fields):
    """Up to the order of sums: 1e-5 of the largest."""
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(**fields).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        found = gradients[1][name]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


# Diagonal injection


def test_the_diagonal_of_every_weight_lies_strictly_between_0_and_1(tiny_model):
    """a = exp(−Δ·exp(log A)), whatever the weights: the state's own path never grows."""
    model = tiny_model(injection="diagonal")
    injection = model.model.injection
    with torch.no_grad():
        for name in ("log_rate", "step"):
            getattr(injection, name).copy_(torch.linspace(-2, 2, 32))
        injection.gain.zero_()
        ones = torch.ones(1, 1, 32)
        a = injection.read(ones, ones, 0)
    assert ((a > 0) & (a < 1)).all()


def test_the_initial_diagonal_injection_passes_the_prelude_on(tiny_config):
    """a = b = 1/2 and h(0) = e, so that u(0) = e, as with the linear injection's [I ‖ 0]."""
    injection = LoopedForCausalLM(tiny_config(injection="diagonal")).model.injection
    e = torch.randn(2, 3, 32)
    torch.testing.assert_close(injection.read(e, e, 0), e)


# Adapters


def test_adapters_start_at_the_shared_matrices(tiny_config, tokens):
    """Equal bits: the product with B = 0 is 0."""
    torch.manual_seed(0)
    adapted = LoopedForCausalLM(tiny_config(adapter_rank=4)).eval()
    shared = LoopedForCausalLM(tiny_config()).eval()
    shared.load_state_dict(adapted.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(adapted(tokens()).logits, shared(tokens()).logits)


def test_an_adapted_matrix_is_the_shared_one_plus_its_low_rank_product():
    torch.manual_seed(0)
    matrix = AdaptedLinear(6, 4, rank=2, recurrences=3)
    x = torch.randn(5, 6)
    with torch.no_grad():
        for parameter in matrix.parameters():
            parameter.normal_()
        for t in range(3):
            whole = matrix.weight + matrix.adapter_up[t] @ matrix.adapter_down[t] / 2
            torch.testing.assert_close(matrix(x, t), x @ whole.T)


def test_only_the_shared_layers_have_adapters(tiny_model):
    names = [name for name, _ in tiny_model(adapter_rank=2).named_parameters() if "adapter" in name]
    assert all(name.startswith("model.recurrent.") for name in names)
    assert len(names) == 2 * 2 * 6  # A and B, two layers, six matrices


# Time conditioning


def test_step_size_and_time_change_the_logits_only_once_the_modulation_is_trained(
    tiny_config, tokens
):
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(time_conditioning=True)).eval()
    plain = LoopedForCausalLM(tiny_config()).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
        modulation = model.model.time_modulation[0]
        modulation.weight.normal_()
        assert not torch.equal(modulation(1, 2), modulation(2, 4))  # t/r is the same, 1/r is not
        assert not torch.equal(modulation(0, 3), modulation(1, 3))


def test_the_shortcut_adds_the_loss_of_fewer_recurrences_and_the_distance_to_the_full_state(
    tiny_model, tokens
):
    """Against separate calls; the distance moves the short trajectory alone."""
    model = tiny_model(time_conditioning=True, shortcut_weight=0.3).train()
    x = tokens()
    loss = model(x, labels=x, shortcut_recurrences=2).loss
    full, short = model.model(x), model.model(x, num_recurrences=2)
    scored = slice(0, -1)
    distance = short.last_hidden_state - full.last_hidden_state.detach()
    expected = model(x, labels=x).loss + 0.3 * (
        model(x, labels=x, num_recurrences=2).loss + distance[:, scored].square().mean()
    )
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


# Exit gate


def test_the_exit_distribution_is_that_of_independent_coins():
    """p(t) = λ(t)·Π (1 − λ(s)), the last takes the rest; sums to 1 also for extreme gates."""
    gates = torch.tensor([[0.3, -1.2, 4.0], [80.0, 0.0, 0.0], [-80.0, -80.0, 80.0]])
    p = exit_log_probabilities(gates[None])[0].exp()
    a, b = 1 / (1 + math.exp(-0.3)), 1 / (1 + math.exp(1.2))
    torch.testing.assert_close(p[0], torch.tensor([a, (1 - a) * b, (1 - a) * (1 - b)]))
    torch.testing.assert_close(p.sum(-1), torch.ones(3))
    torch.testing.assert_close(p[1:], torch.tensor([[1.0, 0, 0], [0, 0, 1.0]]))


def naive_exit_loss(model, x, beta):
    """Σ p(t)·L(t) − β·H(p) token by token, from calls of the model with 1, 2, … recurrences."""
    states = [model.model(x, num_recurrences=t + 1, output_recurrent_states=True) for t in range(3)]
    gates = [torch.sigmoid(model.model.exit_gate(out.recurrent_states[-1])) for out in states]
    total = 0.0
    for row in range(len(x)):
        for i in range(x.shape[1] - 1):
            stay = 1.0
            for t, out in enumerate(states):
                p = stay * (gates[t][row, i] if t < 2 else 1.0)
                stay = stay * (1 - gates[t][row, i])
                raw = model.lm_head(out.last_hidden_state[row, i])
                loss = -torch.log_softmax(15 * torch.tanh(raw / 15), dim=-1)[x[row, i + 1]]
                total = total + p * loss + beta * p * torch.log(p)
    return total / (len(x) * (x.shape[1] - 1))


@pytest.mark.parametrize("skip_logits", [False, True])
def test_the_training_loss_of_a_gate_is_that_of_a_loop_over_tokens_and_exits(
    tiny_model, tokens, skip_logits
):
    model = tiny_model(exit_gate=True, exit_entropy_weight=0.07).train()
    x = tokens(length=6)
    output = model(x, labels=x, skip_logits=skip_logits)
    expected = naive_exit_loss(model, x, 0.07)
    torch.testing.assert_close(output.loss, expected)
    assert (output.logits is None) == skip_logits
    found = torch.autograd.grad(output.loss, list(model.parameters()))
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # float32 sums over 10 tokens


def test_a_gate_changes_neither_logits_nor_the_loss_of_evaluation(tiny_model, tokens):
    gated, x = tiny_model(exit_gate=True), tokens()
    plain = tiny_model()
    plain.load_state_dict(gated.state_dict(), strict=False)
    with torch.no_grad():
        assert torch.equal(gated(x, labels=x).logits, plain(x, labels=x).logits)
        assert torch.equal(gated(x, labels=x).loss, plain(x, labels=x).loss)
        trained = gated.train()(x, labels=x)
        assert torch.equal(trained.logits, plain(x).logits)


def test_losses_of_gates_and_shortcuts_average_over_the_tokens_that_a_trainer_counts(
    tiny_model, tokens
):
    """Two micro-batches of unequal lengths add up to the whole batch's loss, ignored labels left out."""
    x = tokens()
    labels = x.clone()
    labels[0, 5:] = -100
    for fields, more in (
        ({"exit_gate": True}, {}),
        ({"time_conditioning": True}, {"shortcut_recurrences": 1}),
    ):
        model = tiny_model(**fields).train()
        items = (labels[:, 1:] != -100).sum()
        whole = model(x, labels=labels, **more).loss
        parts = [
            model(x[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=items, **more).loss
            for i in range(2)
        ]
        torch.testing.assert_close(sum(parts), whole)


# Bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter_rank": 0}, "adapter_rank is 0: must be at least 1, or None"),
        ({"adapter_rank": 2, "num_backprop_recurrences": 1}, "adapters have weights for each"),
        (
            {"exit_gate": True, "exit_entropy_weight": 0},
            "exit_entropy_weight is 0: an exit gate needs",
        ),
        ({"exit_gate": True, "num_backprop_recurrences": 2}, "detached ones get no gradient"),
        ({"exit_entropy_weight": -1.0}, "exit_entropy_weight is -1.0: must be finite"),
        ({"shortcut_weight": math.inf}, "shortcut_weight is inf: must be finite"),
    ],
)
def test_a_variant_that_would_train_nothing_is_refused(tiny_config, fields, message):
    with pytest.raises(Exception, match=message):
        tiny_config(**fields)


def test_recurrences_beyond_the_adapters_are_refused(tiny_model, tokens):
    model = tiny_model(adapter_rank=2)
    with pytest.raises(ValueError, match="num_recurrences is 4, but this model has adapters for 3"):
        model(tokens(), num_recurrences=4)


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"shortcut_recurrences": 1}, "needs time_conditioning=True"),
        ({"time_conditioning": True}, {"shortcut_recurrences": 3}, r"must lie in 1\.\.2"),
        ({"time_conditioning": True}, {"shortcut_recurrences": 0}, r"must lie in 1\.\.2"),
        (
            {"time_conditioning": True, "exit_gate": True},
            {"shortcut_recurrences": 1},
            "two objectives",
        ),
    ],
)
def test_a_shortcut_that_means_nothing_is_refused(tiny_model, tokens, fields, arguments, message):
    model = tiny_model(**fields).train()
    with pytest.raises(ValueError, match=message):
        model(tokens(), labels=tokens(), **arguments)


def test_a_gate_without_its_loss_is_refused(tiny_model, tokens):
    model = tiny_model(exit_gate=True).train()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    with pytest.raises(ValueError, match="another loss_function would leave it untrained"):
        model(tokens(), labels=tokens())
    with pytest.raises(ValueError, match="there are no labels"):
        tiny_model(time_conditioning=True)(tokens(), shortcut_recurrences=1)
    with pytest.raises(ValueError, match="output_exits needs a model with exit_gate=True"):
        tiny_model().model(tokens(), output_exits=True)


def test_an_unlooped_member_of_the_family_has_none_of_the_loop_s_variants():
    fields = {
        "injection": "diagonal",
        "adapter_rank": 2,
        "time_conditioning": True,
        "exit_gate": True,
    }
    unlooped = LoopedConfig.iso_depth(128, 1, 6, 4, **fields)
    assert unlooped.injection == "passthrough" and unlooped.adapter_rank is None
    assert not unlooped.time_conditioning and not unlooped.exit_gate
    looped = LoopedConfig.iso_depth(128, 2, 6, 4, **fields)
    assert (looped.injection, looped.adapter_rank) == ("diagonal", 2)
