"""MuonH on four gloo processes takes the steps of one: DDP, FSDP2, hybrid sharding, tensor parallelism; state dicts.

This file runs as a script, once for all cases, and forks when everything is imported; each case leaves its result in a
file.
"""

import importlib
import os
import subprocess
import sys
import warnings
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import multiprocessing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import training.muonh
from training.muonh import MuonH

WORLD, STEPS, SAVED = 4, 4, 2
# Rows and columns that 4 and 2 divide or not, fewer rows than processes, more matrices of a shape than processes, and
# fewer.
SHAPES = [(7, 13)] * 5 + [(13, 7)] * 2 + [(6, 6)] * 2 + [(2, 8), (1, 9), (9, 1)]
VECTORS = [(7,), (3,)]
LAYOUTS = ["ddp", "group", "fsdp2", "accelerate", "hybrid", "tensor", "fsdp2-tensor"]
STATES = ["ddp", "fsdp2"]
CPU = torch.device("cpu")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Toy(torch.nn.Module):
    """Matrices and vectors whose gradients are what it is called with."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator) for shape in SHAPES + VECTORS]
        self.matrices = torch.nn.ParameterList(tensors[: len(SHAPES)])
        self.vectors = torch.nn.ParameterList(tensors[len(SHAPES) :])

    def forward(self, gradients):
        parameters = (*self.matrices, *self.vectors)
        return sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True))


def optimizer_of(model, **fields):
    groups = [
        {"params": list(model.matrices), "algorithm": "muonh", "lr": 0.05, "role": "matrix"},
        {"params": list(model.vectors), "algorithm": "adamw", "lr": 0.1, "role": "norm"},
    ]
    return MuonH(groups, **fields)


def gradients(step, part):
    """What process `part` of the four contributes; multiples of 1/64, so that sums of four are exact in any order."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return [torch.randint(-64, 65, s, generator=generator) / 64 for s in SHAPES + VECTORS]


def mean_gradients(step):
    parts = zip(*(gradients(step, part) for part in range(WORLD)), strict=True)
    return [torch.stack(part).mean(0) for part in parts]


def take_steps(optimizer, set_gradients, steps):
    for step in steps:
        optimizer.zero_grad()
        set_gradients(step)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


def single(steps, model=None):
    """Model and optimizer after steps in one process."""
    model = model or Toy()
    optimizer = optimizer_of(model)
    take_steps(optimizer, lambda step: model(mean_gradients(step)).backward(), steps)
    return model, optimizer


# In the four processes


def share(layout, model):
    """Spread the model over the processes; returns what to call."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if layout in ("ddp", "group"):
        return DistributedDataParallel(model)
    if layout == "fsdp2":
        return fully_shard(model)
    if layout == "hybrid":
        return fully_shard(model, mesh=pairs)
    # Columns of the even matrices and rows of the odd ones, each with one or more for every process of the inner pairs.
    mesh = init_device_mesh("cpu", (WORLD,)) if layout == "tensor" else pairs["inner"]
    for i, matrix in enumerate(model.matrices):
        spread = distribute_tensor(matrix.detach(), mesh, [Shard((i + 1) % 2)])
        model.matrices[i] = torch.nn.Parameter(spread)
    for i, vector in enumerate(model.vectors):
        spread = distribute_tensor(vector.detach(), mesh, [Replicate()])
        model.vectors[i] = torch.nn.Parameter(spread)
    return model if layout == "tensor" else fully_shard(model, mesh=pairs["outer"])


def gradient_setter(layout, model, called):
    """Gradients by a backward pass over this process' part; with tensor parallelism laid out by hand."""
    if "tensor" not in layout:
        return lambda step: called(gradients(step, dist.get_rank())).backward()

    def by_hand(step):
        for p, g in zip(model.parameters(), mean_gradients(step), strict=True):
            if p.ndim == 1 and layout == "tensor":  # as sequence parallelism leaves those of norms
                part = g if dist.get_rank() == WORLD - 1 else torch.zeros_like(g)
                p.grad = DTensor.from_local(part, p.device_mesh, [Partial()])
            else:
                p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)

    return by_hand


def whole(parameters):
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


def prepare(layout):
    """Return the model, its optimiser and what sets a step's gradients."""
    model = Toy()
    if layout == "accelerate":
        # Accelerator.prepare, past its test for an accelerator: it shards and puts new parameters into the optimiser.
        accelerator = Accelerator(cpu=True)
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap"
        )
        optimizer = accelerator.prepare_optimizer(optimizer_of(model))
        model, optimizer = accelerator._prepare_fsdp2(model, optimizer)
        return model, optimizer, gradient_setter(layout, model, model)
    # Two groups of two processes, each with the whole model, share the work among themselves.
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if layout == "group" else None
    called = share(layout, model)
    optimizer = optimizer_of(model, process_group=groups and groups[dist.get_rank() // 2])
    return model, optimizer, gradient_setter(layout, model, called)


class Collectives(TorchDispatchMode):
    """Counts gathers, reductions and exchanges."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name().startswith(("c10d::all", "_c10d_functional::all"))
        return function(*args, **(kwargs or {}))


def steps_of(layout):
    """Parameters after all steps; who orthogonalised what in the last one, with how many collectives."""
    model, optimizer, set_gradients = prepare(layout)
    take_steps(optimizer, set_gradients, range(STEPS - 1))
    seen, real = Counter(), training.muonh.orthogonalise

    def counting(matrices, dtype):
        seen[tuple(matrices.shape[1:])] += len(matrices)
        return real(matrices, dtype)

    collectives = Collectives()

    def last_gradients(step):
        set_gradients(step)
        collectives.__enter__()

    training.muonh.orthogonalise = counting
    take_steps(optimizer, last_gradients, [STEPS - 1])
    collectives.__exit__(None, None, None)
    training.muonh.orthogonalise = real
    counts = [None] * WORLD
    dist.all_gather_object(counts, seen)
    return {
        "parameters": whole(model.parameters()),
        "counts": counts,
        "collectives": collectives.count,
    }


def exchange(layout, folder):
    """Go on from a single process' state; then the reverse, the state after the first steps for a single process."""
    model, optimizer, set_gradients = prepare(layout)
    before = whole(model.parameters())
    single_process = torch.load(folder / "single.pt")
    fresh = get_optimizer_state_dict(model, optimizer, options=FULL)  # takes a step of rate 0
    untouched = all(map(torch.equal, before, whole(model.parameters())))
    set_model_state_dict(model, single_process["model"], options=FULL)
    set_optimizer_state_dict(model, optimizer, single_process["optimizer"], options=FULL)
    loaded = deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL))
    take_steps(optimizer, set_gradients, range(SAVED, STEPS))
    parameters = whole(model.parameters())

    model, optimizer, set_gradients = prepare(layout)
    take_steps(optimizer, set_gradients, range(SAVED))
    return {
        "untouched": untouched,
        "fresh": fresh,
        "loaded": loaded,
        "parameters": parameters,
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
    }


def error_of(action):
    try:
        action()
    except ValueError as error:
        return str(error)


def flat_shards(use_orig_params, early):
    """FSDP1, with the optimiser made before or after."""
    model = Toy()
    optimizer = optimizer_of(model) if early else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # FSDP1 is deprecated
        sharded = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=CPU)
    if not early:
        optimizer = MuonH([{"params": sharded.parameters(), "algorithm": "muonh", "lr": 0.1}])
    sharded(gradients(0, 0)).backward()
    optimizer.step()


def different_models():
    model = Toy()
    with torch.no_grad():
        model.matrices[0] *= 1 + dist.get_rank()
    optimizer = optimizer_of(model)
    take_steps(optimizer, lambda step: model(mean_gradients(step)).backward(), [0])


def work(rank, folder):
    """What each process does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ["LOCAL_WORLD_SIZE"] = str(WORLD)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    warnings.simplefilter("error")
    results = {f"steps-{layout}": steps_of(layout) for layout in LAYOUTS}
    results |= {f"exchange-{layout}": exchange(layout, folder) for layout in STATES}
    results["errors"] = {
        "different": error_of(different_models),
        "flat": error_of(lambda: flat_shards(use_orig_params=False, early=False)),
        "views": error_of(lambda: flat_shards(use_orig_params=True, early=False)),
        "later views": error_of(lambda: flat_shards(use_orig_params=True, early=True)),
    }
    if rank == 0:
        for name, result in results.items():
            torch.save(result, folder / f"{name}.pt")
    dist.destroy_process_group()


# In the test


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    """Return a reader of the cases' results."""
    folder = tmp_path_factory.mktemp("four-processes")
    model, optimizer = single(range(SAVED))
    states = {
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
    }
    torch.save(states, folder / "single.pt")
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return lambda name: torch.load(folder / f"{name}.pt")


@pytest.fixture(scope="module")
def straight():
    """Model of one process after all steps."""
    return single(range(STEPS))[0]


def assert_same_update(found, model, bound=2e-5):
    """Compare the movement since the first step, relative to its norm.

    Gradients and momenta are equal to the bit, but norms and products are summed in another order: 6e-8 each, which
    the five iterations of Polar Express, whose slopes multiply to 1,000 at singular value 0, amplify. Measured: 2e-6.
    """
    for a, b, first in zip(found, model.parameters(), Toy().parameters(), strict=True):
        moved = (b - first).norm()
        assert moved > 0.01 and (a - b).norm() <= bound * moved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_processes_take_the_steps_of_one(four_processes, straight, layout):
    assert_same_update(four_processes(f"steps-{layout}")["parameters"], straight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_matrix_is_orthogonalised_by_one_process(four_processes, layout):
    """Summed over processes every matrix is counted once, and nobody has more than four of the seven largest."""
    counts = four_processes(f"steps-{layout}")["counts"]
    copies = 2 if layout == "group" else 1  # two groups of processes, each with its model
    of_shape = Counter(tuple(sorted(shape)) for shape in SHAPES)
    assert sum(counts, Counter()) == Counter({s: copies * n for s, n in of_shape.items()})
    assert max(count[7, 13] for count in counts) <= 4


def test_collectives_grow_with_the_number_of_layouts_and_not_of_matrices(four_processes):
    """12 matrices in 4 oriented shapes, 6 with the side on which FSDP2 cuts: to and fro, and norms if sharded."""
    assert four_processes("steps-ddp")["collectives"] == 4
    for layout in ("fsdp2", "accelerate"):
        assert four_processes(f"steps-{layout}")["collectives"] == 3 * 6


# State dicts


def assert_same_state(found, expected):
    assert found.keys() == expected.keys() and len(found) == len(SHAPES) + len(VECTORS)
    for name, state in expected.items():
        assert found[name].keys() == state.keys()
        for key, value in state.items():
            assert found[name][key].dtype == torch.float32
            assert torch.equal(found[name][key], value), (name, key)


@pytest.mark.parametrize("layout", STATES)
def test_a_full_state_of_one_process_goes_on_in_four(four_processes, straight, layout):
    result = four_processes(f"exchange-{layout}")
    assert_same_state(result["loaded"]["state"], four_processes("single")["optimizer"]["state"])
    assert_same_update(result["parameters"], straight)


@pytest.mark.parametrize("layout", STATES)
def test_a_full_state_of_four_processes_goes_on_in_one(four_processes, straight, layout):
    result = four_processes(f"exchange-{layout}")
    model = Toy()
    optimizer = optimizer_of(model)
    set_model_state_dict(model, result["model"], options=FULL)
    set_optimizer_state_dict(model, optimizer, result["optimizer"], options=FULL)
    assert_same_state(
        get_optimizer_state_dict(model, optimizer, options=FULL)["state"],
        result["optimizer"]["state"],
    )
    take_steps(optimizer, lambda s: model(mean_gradients(s)).backward(), range(SAVED, STEPS))
    assert_same_update(list(model.parameters()), straight)


@pytest.mark.parametrize("layout", STATES)
def test_making_an_empty_state_leaves_every_bit_of_the_weights(four_processes, layout):
    """torch.distributed.checkpoint makes it by a step with zero gradients and rate 0. Radii are those of the whole."""
    result = four_processes(f"exchange-{layout}")
    assert result["untouched"]
    for i, matrix in enumerate(Toy().matrices):
        state = result["fresh"]["state"][f"matrices.{i}"]
        assert (state["momentum_buffer"] == 0).all() and state["momentum_buffer"].shape == SHAPES[i]
        assert state["radius"].item() == pytest.approx(matrix.norm().item(), rel=1e-6)


# Refused


@pytest.mark.parametrize("case", ["flat", "views", "later views"])
def test_flat_shards_are_refused(four_processes, case):
    message = four_processes("errors")[case]
    assert "MuonH needs whole matrices" in message
    assert "use fully_shard instead (FSDP2; Accelerate: fsdp_version 2)" in message


def test_plain_matrices_that_differ_between_processes_are_refused(four_processes):
    message = four_processes("errors")["different"]
    assert "muonh matrices differ between processes" in message and "wrap the model" in message


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # DDP would in each process
    multiprocessing.start_processes(work, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
