"""MuonH and AdamW in one optimiser: matrices move on spheres, everything else by AdamW.

MuonH (Muon on the hyperball; arXiv:2606.16899, as used by Schwethelm et al. 2026, arXiv:2604.21106) orthogonalises the
Nesterov momentum of a matrix, scales it to the matrix's initial Frobenius norm R, steps, and projects back onto
‖W‖_F = R, so that ‖ΔW‖ / ‖W‖ is the learning rate for every width.

Over several processes each matrix is orthogonalised by one of them: a stack of n matrices, each in shards (FSDP2,
tensor parallelism) or whole on every process (DDP), is redistributed along n, orthogonalised, and redistributed back.

Shapes: n matrices of one stack; rows ≤ columns of a matrix, turned if need be.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.adamw import adamw

from .orthogonalise import orthogonalise

# Elements of the matrices that a process multiplies at a time: on a CPU they and their products fit a core's cache.
CPU_CHUNK, CHUNK = 2**17, 2**24


class MuonH(torch.optim.Optimizer):
    """MuonH for groups with algorithm "muonh", AdamW without weight decay for groups with algorithm "adamw".

    Parameters may be sharded by FSDP2 or tensor parallelism (DTensors). Plain ones, and their gradients, must be equal
    on all processes of `process_group`, as DDP makes them. The state is kept by parameter, sharded as the parameter is,
    so that a full state dict (torch.distributed.checkpoint.state_dict) fits any number of processes.

    Parameters
    ----------
    groups
        Parameter groups; each needs `algorithm` and `lr`. "muonh" groups may set `momentum`, "adamw" groups `betas`,
        `eps` and `fused`.
    orthogonalise_dtype
        Dtype of the orthogonalisation and of what processes send each other; bfloat16 costs about 0.05 of relative
        accuracy and is faster where the hardware multiplies it. The momentum is float32 in any case.
    process_group
        Processes that share the work on plain matrices; by default all, where torch.distributed is initialised.
        A group of this process alone shares nothing.

    Raises
    ------
    ValueError
        If a group's algorithm is unknown, or a "muonh" parameter is not a matrix in float32 with non-zero norm, whole
        or in shards of whole rows or columns, or a plain one differs between processes at the first step.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        orthogonalise_dtype: torch.dtype = torch.float32,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # `fused` is where Optimizer.load_state_dict looks whether `step` belongs on the parameter's device.
        defaults = {"momentum": 0.95, "betas": (0.8, 0.95), "eps": 1e-10, "fused": True}
        super().__init__(groups, defaults)
        self.orthogonalise_dtype = orthogonalise_dtype
        self.process_group = process_group
        self._meshes: dict[str, DeviceMesh] = {}
        for group in self.param_groups:
            if group.get("algorithm") not in ("muonh", "adamw"):
                raise ValueError(
                    f"algorithm is {group.get('algorithm')!r}: a group needs 'muonh' or 'adamw'."
                )
            for parameter in group["params"] if group["algorithm"] == "muonh" else ():
                _check_matrix(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of every group; parameters without gradient stay, and so do all weights where lr is 0."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
            else:
                for layout, matrices in self._stacks(group["params"]):
                    self._step_muonh(group, layout, matrices)
        return loss

    def _stacks(self, parameters: list[Tensor]) -> Iterator[tuple["_Layout", list[Tensor]]]:
        """Matrices with gradient, of equal layout, as many as the processes multiply at a time."""
        by_layout: dict[_Layout, list[Tensor]] = {}
        for parameter in parameters:
            _check_matrix(parameter)
            if parameter.grad is not None:
                by_layout.setdefault(self._layout(parameter), []).append(parameter)
        for layout, matrices in by_layout.items():
            size = layout.stack_size()
            for start in range(0, len(matrices), size):
                yield layout, matrices[start : start + size]

    def _layout(self, matrix: Tensor) -> "_Layout":
        rows, columns = matrix.shape
        mesh: DeviceMesh | None
        if isinstance(matrix, DTensor):
            mesh, placements = matrix.device_mesh, tuple(matrix.placements)
        else:
            mesh = self._mesh(matrix.device.type)
            placements = () if mesh is None else (Replicate(),)
        if rows > columns:
            placements = _move(placements, lambda dim: 1 - dim)
        return _Layout((min(matrix.shape), max(matrix.shape)), matrix.device, mesh, placements)

    def _mesh(self, device_type: str) -> DeviceMesh | None:
        """Return the processes that share the work on plain matrices, if there are several."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        if group is None or group.size() == 1:
            return None
        if device_type not in self._meshes:
            self._meshes[device_type] = DeviceMesh.from_group(group, device_type)
        return self._meshes[device_type]

    def _step_muonh(self, group: dict[str, Any], layout: "_Layout", stack: list[Tensor]) -> None:
        """Step matrices of one layout together.

        m ← m + (1 − μ)(g − m), u = g + μ(m − g), O = orthogonalise(u)·R/‖O‖, W ← W − lr·O, W ← W·R/‖W‖.
        """
        self._create_states(layout, stack)
        lr, momentum = float(group["lr"]), group["momentum"]
        weights, gradients = [_local(matrix) for matrix in stack], _gradients(stack)
        buffers = [_local(self.state[matrix]["momentum_buffer"]) for matrix in stack]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        if lr == 0:
            return
        updates = torch._foreach_lerp(gradients, buffers, momentum)
        tall = [matrix.shape[0] > matrix.shape[1] for matrix in stack]
        batch = torch.stack([u.mT if turn else u for u, turn in zip(updates, tall, strict=True)])
        dtype = self.orthogonalise_dtype
        share = orthogonalise(layout.gather_share(batch.to(dtype)), dtype)  # [share, rows, columns]
        norms = torch.linalg.vector_norm(share, dim=(1, 2), keepdim=True, dtype=torch.float32)
        share /= norms.clamp_min(1e-12)
        batch = layout.return_share(share, len(stack)).float()  # [n, local rows, local columns]
        radii = torch.stack([self.state[matrix]["radius"] for matrix in stack])  # [n]
        batch *= (-lr * radii)[:, None, None]
        steps = [o.mT if turn else o for o, turn in zip(batch, tall, strict=True)]
        torch._foreach_add_(weights, steps)
        torch._foreach_mul_(weights, list((radii / layout.norms(weights)).unbind()))

    def _create_states(self, layout: "_Layout", stack: list[Tensor]) -> None:
        new = [matrix for matrix in stack if matrix not in self.state]
        if not new:
            return
        radii = layout.norms([_local(matrix) for matrix in new])
        for matrix, radius in zip(new, radii.unbind(), strict=True):
            if not 0 < radius < torch.inf:
                raise ValueError(
                    f"A muonh matrix of shape {tuple(matrix.shape)} is {'zero' if radius == 0 else 'not finite'}: it "
                    "would stay so, since its norm is kept. Initialise it, or put it in an 'adamw' group."
                )
        if layout.mesh is not None and not isinstance(new[0], DTensor):
            _check_equal(radii, layout.mesh)
        for matrix, radius in zip(new, radii, strict=True):
            self.state[matrix] = {
                "momentum_buffer": torch.zeros_like(matrix),
                "radius": radius.clone(),
            }

    def _step_adamw(self, group: dict[str, Any]) -> None:
        """Step each parameter, or this process' shard of it: AdamW knows single elements only."""
        parameters = [p for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            [_local(parameter) for parameter in parameters],
            _gradients(parameters),
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )


class _Layout(NamedTuple):
    """How matrices of one stack lie over processes; with rows ≤ columns, so that tall ones count as turned."""

    shape: tuple[int, int]
    device: torch.device
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    def stack_size(self) -> int:
        """Return how many matrices all processes together multiply at a time."""
        chunk = CPU_CHUNK if self.device.type == "cpu" else CHUNK
        processes = 1 if self.mesh is None else self.mesh.size()
        return processes * max(1, chunk // (self.shape[0] * self.shape[1]))

    def gather_share(self, batch: Tensor) -> Tensor:
        """Turn local parts of n matrices into this process' share of whole ones.

        [n, local rows, local columns] → [share, rows, columns]
        """
        if self.mesh is None:
            return batch
        stacked = self._as_stack(batch, len(batch), self._by_part())
        return stacked.redistribute(placements=self._by_matrix()).to_local()

    def return_share(self, share: Tensor, n: int) -> Tensor:
        """Inverse of gather_share."""
        if self.mesh is None:
            return share
        stacked = self._as_stack(share, n, self._by_matrix())
        return stacked.redistribute(placements=self._by_part()).to_local()

    def norms(self, parts: list[Tensor]) -> Tensor:
        """Frobenius norms of whole matrices, from their local parts: [n]."""
        norms = torch.stack(torch._foreach_norm(parts))
        dims = [dim for dim, placement in enumerate(self.placements) if hasattr(placement, "dim")]
        if self.mesh is None or not dims:
            return norms
        squares = norms**2
        for dim in dims:
            dist.all_reduce(squares, group=self.mesh.get_group(dim))
        return squares**0.5

    def _by_matrix(self) -> tuple[Placement, ...]:
        return (Shard(0),) * len(self.placements)

    def _by_part(self) -> tuple[Placement, ...]:
        return _move(self.placements, lambda dim: dim + 1)

    def _as_stack(self, local: Tensor, n: int, placements: tuple[Placement, ...]) -> DTensor:
        rows, columns = self.shape
        return DTensor.from_local(
            local,
            self.mesh,
            placements,
            shape=torch.Size((n, rows, columns)),
            stride=(rows * columns, columns, 1),
        )


def _check_matrix(parameter: Tensor) -> None:
    if parameter.ndim != 2 or parameter.dtype != torch.float32:
        raise ValueError(
            f"A muonh parameter has shape {tuple(parameter.shape)} and dtype {parameter.dtype}: MuonH needs whole "
            "matrices with float32 master weights. Put it in an 'adamw' group, or keep float32 weights and use "
            "autocast. If FSDP1 made it flat, use fully_shard instead (FSDP2; Accelerate: fsdp_version 2)."
        )


def _check_equal(radii: Tensor, mesh: DeviceMesh) -> None:
    """Refuse plain matrices that differ between processes; 1e-5 for sums in the order of another device."""
    extremes = torch.stack([radii, -radii])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group())
    largest, smallest = extremes[0], -extremes[1]
    if (largest - smallest > 1e-5 * largest).any():
        raise ValueError(
            "muonh matrices differ between processes, which would mix up each other's updates: wrap the model (DDP or "
            "fully_shard), or pass the process_group whose processes hold the same model."
        )


def _move(placements: tuple[Placement, ...], to: Callable[[int], int]) -> tuple[Placement, ...]:
    """Return the same kinds of placements with shards of other dimensions."""
    moved: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard):
            moved.append(Shard(to(placement.dim)))
        elif hasattr(placement, "split_factor"):  # strided shards: FSDP2 over tensor parallelism
            strided: Any = placement
            moved.append(type(strided)(to(strided.dim), split_factor=strided.split_factor))
        else:
            moved.append(placement)
    return tuple(moved)


def _local(tensor: Tensor) -> Tensor:
    """Return this process' part, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    """Local parts of the gradients, laid out as the parameters are."""
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)  # a partial sum, say
        assert gradient is not None
        gradients.append(_local(gradient))
    return gradients
