"""Two gloo processes, half of the batch each, give the gradients of one: DDP, FSDP2, tensor parallelism.

This file runs as a script, once for all cases, and forks when everything is imported; each case leaves its gradients in
a file.
"""

import os
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from safetensors.torch import load_file, save_file
from torch import multiprocessing
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from hf_looped import LoopedConfig, LoopedForCausalLM

MODELS = {
    "linear": {},
    "linear-truncated": {"num_backprop_recurrences": 1},
    "additive-truncated": {"injection": "additive", "num_backprop_recurrences": 1},
    "passthrough": {"injection": "passthrough"},
    "hyperconnections": {"injection": "hyperconnections"},
    "tied": {"tie_word_embeddings": True},
    "gated": {
        "gated_mlp": True,
        "qk_norm": False,
        "embedding_norm": False,
        "recurrent_norm": False,
    },
}
WITH_LOGITS, MINIMAL_MEMORY = "with-logits", "minimal-memory"  # checkpointing and no logits
CASES = [
    *product(("ddp", "fully_shard"), ("linear",), (WITH_LOGITS,)),
    *product(("ddp", "fully_shard"), MODELS, (MINIMAL_MEMORY,)),
    *product(("tensor", "plan"), ("linear", "gated"), (WITH_LOGITS,)),
    *product(("tensor", "plan"), ("tied",), (MINIMAL_MEMORY,)),
    *product(("accelerate",), ("linear", "tied"), (MINIMAL_MEMORY,)),
]
IDS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))


def build(fields):
    """Model in which every weight is away from its initial value, so that each one matters."""
    torch.manual_seed(0)
    config = LoopedConfig(
        vocab_size=64,
        hidden_size=32,
        num_attention_heads=2,
        num_prelude_layers=1,
        num_recurrent_layers=1,
        num_coda_layers=1,
        num_recurrences=2,
        **fields,
    )
    model = LoopedForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def gradients(model, ids, **kwargs):
    """Gradients of a second step, after one with another r: DDP rearranges its buckets in between."""
    for step in ({"num_recurrences": 1}, {}):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False, **step, **kwargs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


# In the two processes


def load(folder, kind):
    """The model as each way of sharing the work wants it."""
    parallel = {"tensor": {"tp_size": 2, "tp_plan": "auto"}, "plan": {"fsdp_size": 2}}.get(kind)
    distributed = {} if parallel is None else {"distributed_config": DistributedConfig(**parallel)}
    return LoopedForCausalLM.from_pretrained(folder, **distributed).train()


def share(kind, model):
    """Wrap the model; Transformers' plans have done it while loading."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fully_shard":
        for layer in (*model.model.prelude, *model.model.recurrent, *model.model.coda):
            fully_shard(layer)
        return fully_shard(model)
    if kind == "accelerate":
        # Accelerator.prepare would shard on accelerators alone; these are the steps it takes there.
        accelerator = Accelerator(cpu=True)
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
        )
        return fsdp2_prepare_model(accelerator, fsdp2_apply_ac(accelerator, model))
    return model


def run(folder, kind, name, option):
    """Gradients of this process' part, gathered."""
    model = load(folder / name, kind)
    if option == MINIMAL_MEMORY and kind != "accelerate":  # which checkpoints by itself
        model.activation_checkpointing_enable()
    model = share(kind, model)
    if kind in ("fully_shard", "plan", "accelerate"):
        layer = model.model.recurrent[0]
        assert isinstance(model, FSDPModule) and isinstance(layer, FSDPModule)
    if kind == "tensor":
        assert isinstance(model.lm_head.weight, DTensor)
    mine = IDS if kind == "tensor" else IDS[dist.get_rank()][None]
    raw = gradients(model, mine, skip_logits=option == MINIMAL_MEMORY)
    return {
        parameter.replace("module.", "").replace("_checkpoint_wrapped_", ""): (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        )
        for parameter, gradient in raw.items()
    }


def work(rank, folder):
    """What each of the two processes does."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    warnings.simplefilter("error")
    for case in CASES:
        gathered = run(folder, *case)
        if rank == 0:
            save_file(gathered, folder / f"{'-'.join(case)}.safetensors")
    dist.destroy_process_group()


# In the test


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Folder with the gradients of all cases."""
    folder = tmp_path_factory.mktemp("two-processes")
    for name, fields in MODELS.items():
        build(fields).save_pretrained(folder / name)
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_processes_give_the_gradients_of_one(two_processes, case):
    """The halves of the batch are summed in another order: 1e-6 of each gradient's norm. Tensor parallelism splits the
    sum of every product in every layer: 1e-5.

    A warning, a parameter without gradient (DDP runs without find_unused_parameters) or one that is ready twice would
    have ended the processes.
    """
    kind, name, option = case
    model = build(MODELS[name]).train()
    expected = gradients(model, IDS, skip_logits=option == MINIMAL_MEMORY)
    actual = load_file(two_processes / f"{'-'.join(case)}.safetensors")
    assert actual.keys() == expected.keys()
    tolerance = 1e-5 if kind == "tensor" else 1e-6
    for parameter, gradient in expected.items():
        assert gradient.norm() > 0
        assert (actual[parameter] - gradient).norm() <= tolerance * gradient.norm(), parameter


if __name__ == "__main__":
    multiprocessing.start_processes(work, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
