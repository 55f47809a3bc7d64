"""MuonH and AdamW in one optimiser: matrices move on spheres, everything else by AdamW.

MuonH (Muon on the hyperball; arXiv:2606.16899, as used by Schwethelm et al. 2026, arXiv:2604.21106) orthogonalises the
Nesterov momentum of a matrix, scales it to the matrix's initial Frobenius norm R, steps, and projects back onto
‖W‖_F = R, so that ‖ΔW‖ / ‖W‖ is the learning rate for every width. The orthogonalisation is Polar Express (Amsel et
al. 2025, arXiv:2505.16932).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ, for five steps; safety 2e-2, cushion 2 (Amsel et al. 2025, algorithm 1).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Matrices in one batched product: larger stacks fall out of a core's cache.
CHUNK = 16


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate U·Vᵀ of each matrix U·Σ·Vᵀ, [n, rows, columns] with rows ≤ columns, by five Polar Express steps.

    Singular values end within about [0.4, 1.15]. Computed in `dtype`, returned in it. A zero matrix stays zero.
    """
    x = matrices.to(dtype)
    x = x / (1.02 * torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True) + 1e-6).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonH(torch.optim.Optimizer):
    """MuonH for groups with algorithm "muonh", AdamW without weight decay for groups with algorithm "adamw".

    Parameters
    ----------
    groups
        Parameter groups; each needs `algorithm` and `lr`. "muonh" groups may set `momentum`, "adamw" groups `betas`
        and `eps`.
    orthogonalise_dtype
        Dtype of the orthogonalisation; bfloat16 costs about 0.05 of relative accuracy and is faster where the
        hardware multiplies it.

    Raises
    ------
    ValueError
        If a group's algorithm is unknown, or a "muonh" parameter is not a matrix in float32 with non-zero norm.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        orthogonalise_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"momentum": 0.95, "betas": (0.8, 0.95), "eps": 1e-10}
        super().__init__(groups, defaults)
        self.orthogonalise_dtype = orthogonalise_dtype
        for group in self.param_groups:
            if group.get("algorithm") not in ("muonh", "adamw"):
                raise ValueError(
                    f"algorithm is {group.get('algorithm')!r}: a group needs 'muonh' or 'adamw'."
                )
            for parameter in group["params"] if group["algorithm"] == "muonh" else ():
                if parameter.ndim != 2 or parameter.dtype != torch.float32:
                    raise ValueError(
                        f"A muonh parameter has shape {tuple(parameter.shape)} and dtype {parameter.dtype}: MuonH "
                        "needs whole matrices with float32 master weights. Put it in an 'adamw' group, or keep float32 "
                        "weights and use autocast."
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of every group; parameters without gradient stay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            if group["algorithm"] == "adamw":
                self._step_adamw(group, with_gradient)
            else:
                for stack in _stacks(with_gradient):
                    self._step_muonh(group, stack)
        return loss

    def _step_muonh(self, group: dict[str, Any], stack: list[Tensor]) -> None:
        """Step matrices of one oriented shape together.

        m ← m + (1 − μ)(g − m), u = g + μ(m − g), O = orthogonalise(u)·R/‖O‖, W ← W − lr·O, W ← W·R/‖W‖.
        """
        for matrix in stack:
            if not self.state[matrix]:
                radius = torch.linalg.vector_norm(matrix)
                if radius == 0:
                    raise ValueError(
                        f"A muonh matrix of shape {tuple(matrix.shape)} is zero: it would stay so, since its norm is "
                        "kept. Initialise it, or put it in an 'adamw' group."
                    )
                self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix), "radius": radius}
        momentum = group["momentum"]
        gradients = _gradients(stack)
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in stack]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, buffers, momentum)
        batch = torch.stack(
            [u if u.shape[0] <= u.shape[1] else u.mT for u in updates]
        )  # [n, rows, columns]
        batch = orthogonalise(batch, self.orthogonalise_dtype).float()
        radii = torch.stack([self.state[matrix]["radius"] for matrix in stack])  # [n]
        batch *= (radii / torch.linalg.vector_norm(batch, dim=(1, 2)).clamp_min(1e-12))[
            :, None, None
        ]
        directions = [
            o if matrix.shape[0] <= matrix.shape[1] else o.mT
            for o, matrix in zip(batch, stack, strict=True)
        ]
        torch._foreach_add_(stack, directions, alpha=-group["lr"])
        norms = torch.stack(torch._foreach_norm(stack))
        torch._foreach_mul_(stack, list((radii / norms).unbind()))

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            _gradients(parameters),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _stacks(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of equal shape up to transposition, in chunks small enough to multiply as one batch."""
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
    for stack in by_shape.values():
        for start in range(0, len(stack), CHUNK):
            yield stack[start : start + CHUNK]
