"""Norms of gradients by section and of recurrent states, against sums written out in float64."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import training
from hf_looped import LoopedConfig, LoopedForCausalLM
from training.monitor import gradient_norms, state_norms

PREFIXES = {
    "model.embed_tokens.": "embedding",
    "model.prelude.": "prelude",
    "model.injection.": "injection",
    "model.recurrent.": "recurrent",
    "model.coda.": "coda",
    "model.embed_norm.": "norm",
    "model.recurrent_norm.": "norm",
    "model.norm.": "norm",
    "lm_head.": "lm_head",
}


def tiny_config(**fields):
    """1 + 1·3 + 1 layers of width 24."""
    return LoopedConfig.iso_depth(
        24, 3, effective_depth=5, shared_depth=3, head_dim=8, vocab_size=96, **fields
    )


def batch(seed=0):
    tokens = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens[:, :-1], "shift_labels": tokens[:, 1:].contiguous()}


def model_with_gradients(**fields):
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(**fields)).train()
    model(**batch(), skip_logits=True).loss.backward()
    return model


def norms_in_float64(model):
    """Norms of all and of each section by its prefix, summed over elements in float64."""
    squares = {}
    for name, parameter in model.named_parameters():
        (section,) = (s for prefix, s in PREFIXES.items() if name.startswith(prefix))
        square = float(np.square(parameter.grad.double().numpy()).sum())
        squares[section] = squares.get(section, 0.0) + square
    return {"gradient_norm": math.sqrt(sum(squares.values()))} | {
        f"gradient_norm/{section}": math.sqrt(square) for section, square in squares.items()
    }


@pytest.mark.parametrize("injection", ["linear", "hyperconnections", "additive"])
@pytest.mark.parametrize("wrappers", [(), ("module",), ("_orig_mod",), ("module", "_orig_mod")])
def test_norms_of_sections_are_those_of_their_parameters(injection, wrappers):
    """Float32 sums within a parameter, float64 between: 1e-6. DDP and torch.compile put a prefix before names."""
    model = model_with_gradients(injection=injection)
    expected = norms_in_float64(model)
    assert ("gradient_norm/injection" in expected) == (injection != "additive")
    wrapped = model
    for name in wrappers:
        wrapped = nn.ModuleDict({name: wrapped})
    norms = gradient_norms(wrapped)
    assert norms == pytest.approx(expected, rel=1e-6)
    assert gradient_norms(model) == norms  # and the same bits again


def test_an_unlooped_model_has_no_norm_of_sections_that_it_lacks():
    torch.manual_seed(0)
    config = LoopedConfig.iso_depth(
        16, 1, effective_depth=2, shared_depth=2, head_dim=8, vocab_size=96
    )
    model = LoopedForCausalLM(config).train()
    model(**batch(), skip_logits=True).loss.backward()
    norms = gradient_norms(model)
    assert norms == pytest.approx(norms_in_float64(model), rel=1e-6)
    assert set(norms) == {
        "gradient_norm",
        *(f"gradient_norm/{section}" for section in ("embedding", "recurrent", "norm", "lm_head")),
    }


def test_parameters_outside_the_known_modules_are_counted_as_other():
    model = nn.ModuleDict({"prelude": nn.Linear(2, 2, bias=False), "adapter": nn.Linear(2, 1)})
    model["prelude"].weight.grad = torch.full((2, 2), 2.0)
    model["adapter"].weight.grad = torch.full((1, 2), 1.5)
    norms = gradient_norms(model)  # its bias has no gradient
    squares = {name: norm**2 for name, norm in norms.items()}
    assert squares == pytest.approx(
        {"gradient_norm": 20.5, "gradient_norm/prelude": 16.0, "gradient_norm/other": 4.5}
    )


def test_no_gradients_have_norm_zero():
    assert gradient_norms(LoopedForCausalLM(tiny_config())) == {"gradient_norm": 0.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("model.recurrent.0.mlp.down_proj.weight", "recurrent"),
        ("model.recurrent_norm.weight", "norm"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_a_gradient_that_is_not_finite_shows_in_the_total_and_in_its_section_alone(
    name, section, value
):
    model = model_with_gradients()
    model.get_parameter(name).grad.view(-1)[-1] = value
    norms = gradient_norms(model)
    wrong = {name for name, norm in norms.items() if not math.isfinite(norm)}
    assert wrong == {"gradient_norm", f"gradient_norm/{section}"}


def test_a_large_norm_does_not_overflow_when_sections_are_summed():
    """Every parameter's norm is 1.5e19: its square fits float32 (3.4e38), the sum of two of them doesn't."""
    model = LoopedForCausalLM(tiny_config())
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[0] = 1.5e19
    expected = 1.5e19 * math.sqrt(len(parameters))
    assert gradient_norms(model)["gradient_norm"] == pytest.approx(expected, rel=1e-6)


def test_norms_of_half_precision_gradients_are_summed_and_returned_in_float32():
    """6·10^4 ones: in bfloat16 the sum would stop growing at 2^8, and the norm would be 2e-3 off; on CPUs 3e-5."""
    model = nn.ModuleDict({"coda": nn.Linear(300, 200, bias=False, dtype=torch.bfloat16)})
    model["coda"].weight.grad = torch.ones(200, 300, dtype=torch.bfloat16)
    expected = math.sqrt(60_000)
    assert gradient_norms(model)["gradient_norm/coda"] == pytest.approx(expected, rel=1e-4)


def test_the_norm_of_a_large_matrix_is_summed_in_chunks():
    """2^23 elements: one float32 sum on a CPU is off by 3e-4, chunks by 1e-5."""
    model = nn.ModuleDict({"lm_head": nn.Linear(512, 2**14, bias=False, device="meta")})
    gradient = torch.randn(2**14, 512, generator=torch.Generator().manual_seed(0))
    model["lm_head"].weight = nn.Parameter(gradient)
    model["lm_head"].weight.grad = gradient
    expected = gradient.double().norm().item()
    assert gradient_norms(model)["gradient_norm"] == pytest.approx(expected, rel=3e-5)


PROLOGUE = """
import json, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from training.monitor import gradient_norms

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
"""
EPILOGUE = """
open(f"{folder}/{rank}.json", "w").write(json.dumps(found))
dist.destroy_process_group()
"""


def on_two_processes(script, folder, *arguments):
    """Run the script, which leaves `found`, and return what each process found."""
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROLOGUE + script + EPILOGUE,
                str(rank),
                str(folder),
                *arguments,
            ],
            cwd=Path(training.__file__).parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_with_shards_get_the_norms_of_the_whole_model_by_one_collective(tmp_path):
    """FSDP2; rows are 3 and 1, which don't divide by two. Gradients are means over processes, here known: 1e-6."""
    script = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, rows in (("prelude", 3), ("recurrent", 8), ("coda", 1)):
            self.add_module(name, torch.nn.Linear(4, rows, bias=False))
        self.outside = torch.nn.Parameter(torch.ones(2))  # not sharded

model = Model()
fully_shard(model.prelude)
fully_shard(model, ignored_params={model.outside})
for name, parameter in model.named_parameters():  # as backward leaves them
    gradient = torch.arange(1.0, 1 + parameter.numel()).view(parameter.shape)
    if hasattr(parameter, "device_mesh"):
        gradient = torch.distributed.tensor.distribute_tensor(
            gradient, parameter.device_mesh, parameter.placements
        )
    parameter.grad = gradient
with CommDebugMode() as communication:
    norms = gradient_norms(model)
found = {"norms": norms, "collectives": communication.get_total_counts()}
if rank == 1:
    model.prelude.weight.grad.to_local()[0, 0] = torch.nan
found["poisoned"] = [name for name, norm in gradient_norms(model).items() if norm != norm]
"""
    found = on_two_processes(script, tmp_path)
    squares = {
        name: sum(i**2 for i in range(1, 1 + size))
        for name, size in (("prelude", 12), ("recurrent", 32), ("coda", 4), ("other", 2))
    }
    expected = {f"gradient_norm/{name}": math.sqrt(square) for name, square in squares.items()}
    expected["gradient_norm"] = math.sqrt(sum(squares.values()))
    assert found[0]["norms"] == pytest.approx(expected, rel=1e-6)
    assert found[0] == found[1]
    assert found[0]["collectives"] == 1
    assert found[0]["poisoned"] == ["gradient_norm", "gradient_norm/prelude"]


@pytest.mark.slow
def test_a_sharded_looped_model_has_the_norms_of_the_whole_one_and_may_return_its_states(tmp_path):
    """Gradients of two processes are summed in another order than here, 1e-5. With the states not a bit changes."""
    script = """
from hf_looped import LoopedConfig, LoopedForCausalLM

fields, rows = map(json.loads, sys.argv[3:])
model = LoopedForCausalLM(LoopedConfig.from_dict(fields)).train()
for layer in (*model.model.prelude, *model.model.recurrent, *model.model.coda):
    fully_shard(layer)
fully_shard(model)
tokens = torch.tensor(rows)[rank : rank + 1]
batch = {"input_ids": tokens[:, :-1], "shift_labels": tokens[:, 1:].contiguous()}

def gradients(states):
    model.zero_grad()
    output = model(**batch, skip_logits=True, output_recurrent_states=states)
    output.loss.backward()
    return [output.loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]

same = all(map(torch.equal, gradients(False), gradients(True)))
found = {"norms": gradient_norms(model), "same": same}
"""
    model = model_with_gradients(injection="hyperconnections")
    tokens = torch.cat((batch()["input_ids"], batch()["shift_labels"][:, -1:]), dim=1)
    fields = json.dumps(model.config.to_dict())
    found = on_two_processes(script, tmp_path, fields, json.dumps(tokens.tolist()))
    assert found[0] == found[1] and found[0]["same"]
    assert found[0]["norms"] == pytest.approx(norms_in_float64(model), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_norms_are_those_of_a_loop_over_tokens(dtype):
    """Float32 sums of 3·5·8 elements, 1e-6; differences of bfloat16 states are not rounded to bfloat16 (4e-3)."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3, 5, 8, generator=generator)
    noise = [torch.randn(3, 5, 8, generator=generator) for _ in range(2)]
    states = [first.to(dtype), (first + 0.02 * noise[0]).to(dtype), (3 * noise[1]).to(dtype)]
    tokens = [state.double().numpy().reshape(15, 8) for state in states]
    expected = {}
    for t, h in enumerate(tokens, start=1):
        sizes = [np.linalg.norm(token) / math.sqrt(8) for token in h]
        expected[f"state_norm/{t}"] = math.sqrt(sum(size**2 for size in sizes) / 15)
        if t > 1:
            before = tokens[t - 2]
            change = sum(np.sum((h[i] - before[i]) ** 2) for i in range(15))
            size = sum(np.sum(before[i] ** 2) for i in range(15))
            expected[f"state_change/{t}"] = math.sqrt(change / size)
    assert state_norms(states) == pytest.approx(expected, rel=1e-6)


def test_a_state_that_stands_still_has_change_zero_and_one_that_doubles_change_one():
    state = torch.ones(1, 2, 4)
    assert state_norms([state, state]) == pytest.approx(
        {"state_norm/1": 1.0, "state_norm/2": 1.0, "state_change/2": 0.0}
    )
    doubling = state_norms([state * 2**t for t in range(4)])
    assert [doubling[f"state_norm/{t}"] for t in (1, 2, 3, 4)] == pytest.approx([1, 2, 4, 8])
    assert [doubling[f"state_change/{t}"] for t in (2, 3, 4)] == pytest.approx([1, 1, 1])


def test_a_fresh_model_has_states_of_size_one_and_one_without_recurrent_norm_larger_ones():
    """RMSNorm with gain one, up to its ε; a bare residual stream grows with the blocks added to it."""
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config())
    norms = state_norms(model(**batch(), output_recurrent_states=True).recurrent_states)
    assert set(norms) == {f"state_norm/{t}" for t in (1, 2, 3)} | {
        "state_change/2",
        "state_change/3",
    }
    assert [norms[f"state_norm/{t}"] for t in (1, 2, 3)] == pytest.approx([1, 1, 1], rel=1e-3)
    bare = LoopedForCausalLM(tiny_config(injection="passthrough", recurrent_norm=False))
    grown = state_norms(bare(**batch(), output_recurrent_states=True).recurrent_states)
    assert 1 < grown["state_norm/1"] < grown["state_norm/2"] < grown["state_norm/3"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_backprop_recurrences": 2},
        {"injection": "hyperconnections"},
        {"injection": "additive", "state_init": "normal"},
    ],
)
def test_asking_for_the_states_changes_no_bit_of_loss_and_gradients(fields):
    torch.manual_seed(0)
    model = LoopedForCausalLM(tiny_config(**fields)).train()
    results = []
    for watch in (False, True):
        torch.manual_seed(1)  # the random initial state
        model.zero_grad()
        output = model(**batch(), skip_logits=True, output_recurrent_states=watch)
        output.loss.backward()
        if watch:
            norms = state_norms(output.recurrent_states)
            assert len(norms) == 5 and all(map(math.isfinite, norms.values()))
        results.append([output.loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *results))
