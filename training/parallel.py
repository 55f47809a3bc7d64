"""A model on one process or several: whole on each (DDP) or sharded (FSDP2), trained by the same loop.

Accelerate prepares DDP. FSDP2 is torch's own `fully_shard`, called here, since Accelerate ignores FSDP on CPUs.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_looped import LoopedForCausalLM


def shard(model: LoopedForCausalLM, accelerator: Accelerator) -> LoopedForCausalLM:
    """Shard every layer and the rest of the model over all processes (FSDP2), in place."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    inner = model.to(accelerator.device).model
    for layer in (*inner.prelude, *inner.recurrent, *inner.coda):
        fully_shard(layer, mesh=mesh)
    return cast(LoopedForCausalLM, fully_shard(model, mesh=mesh))


def accumulating(
    model: nn.Module, accelerator: Accelerator, last: bool
) -> AbstractContextManager[None]:
    """Context of a micro-batch: gradients are summed over processes after the last one only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        return nullcontext()
    return nullcontext() if last else accelerator.no_sync(model)


def gather(accelerator: Accelerator, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Bring tensors whole to the main process' memory, one after another; the others get none. Called by all."""
    gathered = {}
    for name, tensor in tensors:
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if accelerator.is_main_process:
            gathered[name] = whole.cpu().contiguous()
    return gathered


def take(place: Tensor, tensor: Tensor) -> Tensor:
    """Lay a whole tensor out as `place` is: on its device, sharded as it is. Nothing is sent."""
    if not isinstance(place, DTensor):
        return tensor.to(place.device)
    return distribute_tensor(
        tensor.to(place.device), place.device_mesh, place.placements, src_data_rank=None
    )


def on_main_process(accelerator: Accelerator, action: Callable[[], object]) -> None:
    """Let the main process act while the others wait; if it fails, all of them raise its error."""
    outcome: list[Exception | None] = [None]
    if accelerator.is_main_process:
        try:
            action()
        except Exception as error:
            outcome = [error]
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise outcome[0]


def any_process(accelerator: Accelerator, asked: bool) -> bool:
    """Whether any process says yes, so that all of them do the same."""
    if accelerator.num_processes == 1:
        return asked
    said = torch.tensor(float(asked), device=accelerator.device)
    return bool(accelerator.reduce(said).item())
