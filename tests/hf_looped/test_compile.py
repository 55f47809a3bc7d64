"""torch.compile in one graph and torch.export: the results of eager execution."""

import copy

import pytest
import torch
from transformers import StaticCache
from transformers.generation import CompileConfig

# torch's own: Dynamo makes an object of an autograd function that it traces, Inductor imports a scripted module.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}:DeprecationWarning")
    for message in (
        "<class 'torch.autograd.function.Function'> should not be instantiated",
        "`torch.jit.script_method` is deprecated",
    )
]
INJECTIONS = ["linear", "additive", "passthrough", "diagonal", "hyperconnections"]
each_injection = pytest.mark.parametrize("injection", INJECTIONS)
SMALL = {"num_recurrent_layers": 1, "num_coda_layers": 0, "num_recurrences": 2}
ROUNDING = {"rtol": 0, "atol": 1e-4}  # float32 logits up to 15, fused into other orders of sums


@pytest.fixture(autouse=True)
def no_graph_before():
    torch.compiler.reset()


def step(model, module, ids, **kwargs):
    """Loss and gradients of one training step of `module`, which is the model or compiled from it."""
    model.zero_grad()
    loss = module(ids, labels=ids, use_cache=False, **kwargs).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def assert_same_step(actual, expected, tolerance):
    assert abs(actual[0] - expected[0]) <= tolerance * expected[0]
    for a, e in zip(actual[1], expected[1], strict=True):
        assert (a - e).norm() <= tolerance * e.norm()


def assert_compiled_step_is_eager(model, tokens, backend, tolerance, **kwargs):
    """Rows and tokens may change: no second graph is made for them."""
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for number, shape in enumerate(((2, 12), (3, 17), (4, 9))):
        ids = tokens(*shape)
        expected = step(model, model, ids, **kwargs)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            actual = step(model, compiled, ids, **kwargs)
        assert_same_step(actual, expected, tolerance)


def assert_compiled_decoding_is_eager(model, ids, backend):
    """A token at a time into one StaticCache; the first part runs uncompiled, as generate does it."""
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=16)
    steps = []
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model(ids[:, :4], cache=cache)
        for position in range(4, ids.shape[1]):
            position_ids = torch.tensor([[position]])
            with torch.compiler.set_stance("fail_on_recompile" if position > 5 else "default"):
                output = compiled(
                    ids[:, position : position + 1], cache=cache, position_ids=position_ids
                )
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected[:, 4:], **ROUNDING)


# Dynamo alone: one graph, executed as it is


def test_a_training_step_without_logits_is_one_graph_for_all_shapes(tiny_model, tokens):
    """Truncated, the part with a context of its own. The graph has the eager operations, plain instead of by hand."""
    model = tiny_model(**SMALL, num_backprop_recurrences=1).train()
    assert_compiled_step_is_eager(model, tokens, "eager", 1e-5, skip_logits=True)


def test_decoding_into_a_static_cache_is_one_graph(tiny_model, tokens):
    assert_compiled_decoding_is_eager(tiny_model(**SMALL), tokens(), "eager")


@pytest.mark.slow
@pytest.mark.parametrize("skip_logits", [False, True])
@each_injection
def test_every_training_step_is_one_graph_for_all_shapes(
    tiny_model, tokens, injection, skip_logits
):
    """With the backward graph, traced by AOTAutograd."""
    model = tiny_model(**SMALL, injection=injection).train()
    assert_compiled_step_is_eager(model, tokens, "aot_eager", 1e-5, skip_logits=skip_logits)


# Compiled to machine code


@pytest.mark.slow
@pytest.mark.parametrize(("injection", "rs"), [("linear", (2, 1, 3)), ("hyperconnections", (2, 1))])
def test_a_compiled_forward_is_eager(tiny_model, tokens, injection, rs):
    """r is part of the graph; shapes aren't. With and without a padding mask."""
    model = tiny_model(**SMALL, injection=injection)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows, length in ((2, 12), (3, 17)):
            ids = tokens(rows, length)
            mask = torch.ones_like(ids)
            mask[0, :3] = 0
            for r in rs:
                common = {"num_recurrences": r, "use_cache": False}
                expected, actual = model(ids, **common).logits, compiled(ids, **common).logits
                torch.testing.assert_close(actual, expected, **ROUNDING)
            expected, actual = (
                m(ids, attention_mask=mask, use_cache=False).logits for m in (model, compiled)
            )
            torch.testing.assert_close(actual[mask == 1], expected[mask == 1], **ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "skip_logits"),
    [
        ({"num_backprop_recurrences": 1}, True),
        ({"injection": "additive", "num_backprop_recurrences": 1}, False),
        ({"injection": "passthrough", "tie_word_embeddings": True}, True),
        ({"injection": "hyperconnections"}, False),
        (
            {
                **dict.fromkeys(("qk_norm", "embedding_norm", "recurrent_norm"), False),
                "gated_mlp": True,
                "residual_multiplier": 0.25,
                "final_logit_softcapping": None,
            },
            True,
        ),
    ],
    ids=str,
)
def test_a_compiled_training_step_is_eager(tiny_model, tokens, fields, skip_logits):
    """1e-5 of each gradient's norm: sums in other orders."""
    model = tiny_model(**SMALL, **fields).train()
    assert_compiled_step_is_eager(model, tokens, "inductor", 1e-5, skip_logits=skip_logits)


@pytest.mark.slow
def test_a_compiled_step_under_autocast_loses_no_gradient(tiny_model, tokens):
    """Eight bits, three to four layers: 5 % of each gradient; one cast under no_grad and used again would lose all."""
    model, ids = tiny_model(**SMALL, num_backprop_recurrences=1).train(), tokens()
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(ids, labels=ids, use_cache=False).loss
    loss.backward()
    actual = loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]
    assert_same_step(actual, step(model, model, ids), 0.05)


@pytest.mark.slow
def test_a_compiled_step_with_checkpointing_is_eager(tiny_model, tokens):
    model = tiny_model(**SMALL, num_backprop_recurrences=1).train()
    model.activation_checkpointing_enable()
    assert_compiled_step_is_eager(model, tokens, "inductor", 1e-5, skip_logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("injection", ["linear", "hyperconnections"])
def test_compiled_decoding_into_a_static_cache_is_eager(tiny_model, tokens, injection):
    assert_compiled_decoding_is_eager(
        tiny_model(**SMALL, injection=injection), tokens(), "inductor"
    )


@pytest.mark.slow
@pytest.mark.parametrize("r", [None, 3])
def test_generate_compiles_its_decoding_and_gives_the_same_tokens(tiny_model, tokens, r):
    """On CPUs Transformers compiles only when told so."""
    model = tiny_model(**SMALL)
    new = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_recurrences": r}
    expected = model.generate(tokens(), **new)
    config = copy.deepcopy(model.generation_config)
    config.compile_config = CompileConfig(fullgraph=True, mode="default")
    config.compile_config._compile_all_devices = True
    config.cache_implementation = "static"
    assert torch.equal(model.generate(tokens(), generation_config=config, **new), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it did compile


# Export


def exported(model, ids, strict=False):
    """Program of the forward for any number of rows and tokens."""
    dynamic = torch.export.Dim.DYNAMIC
    return torch.export.export(
        model,
        (),
        {"input_ids": ids, "use_cache": False},
        dynamic_shapes={"input_ids": {0: dynamic, 1: dynamic}, "use_cache": None},
        strict=strict,
    )


def assert_exported_is_eager(model, tokens, tmp_path):
    """Saved and loaded, for other shapes than it was made from."""
    with torch.no_grad():
        program = exported(model, tokens())
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        for shape in ((2, 12), (3, 17), (5, 40)):
            ids = tokens(*shape)
            actual = loaded(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(actual, model(ids, use_cache=False).logits, **ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("injection", "state_init"), [*((i, "auto") for i in INJECTIONS), ("linear", "normal")]
)
def test_an_exported_model_gives_the_eager_logits_for_all_shapes(
    tiny_model, tokens, tmp_path, injection, state_init, attention
):
    model = tiny_model(attention, **SMALL, injection=injection, state_init=state_init)
    assert_exported_is_eager(model, tokens, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
def test_strict_export_gives_the_eager_logits(tiny_model, tokens):
    """torch warns of Transformers' recording of outputs, which writes to a variable of its own."""
    model = tiny_model(**SMALL)
    with torch.no_grad():
        program = exported(model, tokens(), strict=True).module()
        actual = program(input_ids=tokens(3, 17), use_cache=False).logits
        expected = model(tokens(3, 17), use_cache=False).logits
    torch.testing.assert_close(actual, expected, **ROUNDING)
