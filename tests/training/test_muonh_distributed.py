"""MuonH on four gloo processes takes the steps of one: DDP, FSDP2, hybrid sharding, tensor parallelism; state dicts.

This file runs as a script, once for all cases, and forks when everything is imported; each case leaves its result in a
file.
"""

import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import training.muonh
from training.muonh import MuonH

WORLD, STEPS, SAVED = 4, 5, 2
# Rows and columns that 4 and 2 divide or not, fewer rows than processes, more matrices of a shape than processes, and
# fewer.
SHAPES = [(7, 13)] * 5 + [(13, 7)] * 2 + [(6, 6)] * 3 + [(1, 9), (9, 1), (2, 8), (8, 16)]
VECTORS = [(7,), (3,)]
LAYOUTS = ["ddp", "group", "fsdp2", "fsdp2-columns", "hybrid", "tensor", "fsdp2-tensor"]
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
    return [torch.stack(g).mean(0) for g in zip(*(gradients(step, p) for p in range(WORLD)))]


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
    if layout == "fsdp2-columns":
        # FSDP2 cuts columns only into equal parts.
        even = lambda p: Shard(int(p.ndim == 2 and p.shape[1] % WORLD == 0))  # noqa: E731
        return fully_shard(model, shard_placement_fn=even)
    if layout == "hybrid":
        return fully_shard(model, mesh=pairs)
    # Columns of the even matrices and rows of the odd ones.
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
            p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)

    return by_hand


def whole(parameters):
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


def steps_of(layout):
    """Parameters after all steps, and who orthogonalised what in the last one with how many collectives."""
    model = Toy()
    # Two groups of two processes, each holding the whole model and sharing the work among themselves.
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if layout == "group" else None
    group = groups[dist.get_rank() // 2] if groups else None
    called = share(layout, model)
    optimizer = optimizer_of(model, process_group=group)
    set_gradients = gradient_setter(layout, model, called)
    take_steps(optimizer, set_gradients, range(STEPS - 1))
    optimizer.zero_grad()
    set_gradients(STEPS - 1)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    seen, real = Counter(), training.muonh.orthogonalise

    def counting(matrices, dtype):
        seen[tuple(matrices.shape[1:])] += len(matrices)
        return real(matrices, dtype)

    training.muonh.orthogonalise = counting
    with CommDebugMode() as communication:
        optimizer.step()
    training.muonh.orthogonalise = real
    counts = [None] * WORLD
    dist.all_gather_object(counts, seen)
    stacks = len({optimizer._layout(matrix) for matrix in model.matrices})
    return {
        "parameters": whole(model.parameters()),
        "counts": counts,
        "collectives": communication.get_total_counts(),
        "stacks": stacks,
    }


def work(rank, folder):
    """What each process does."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    warnings.simplefilter("error")
    for layout in LAYOUTS:
        result = steps_of(layout)
        if rank == 0:
            torch.save(result, folder / f"{layout}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.start_processes(work, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
