"""HyperP: learning rates moved from a reference point to a run's width, batch and horizon.

Rules of Schwethelm et al. 2026 (arXiv:2604.21106, section 4.1), after arXiv:2603.28743. Symbols: d width, B tokens of a
batch, D tokens of the run. Ratios are to the reference point of `TransferConfig`:

    MuonH matrices        base · (B/B_ref)^0.558 · (D/D_ref)^−0.32
    embedding, LM head    base · (B/B_ref)^0.558 · (d/d_ref)^−0.5
    norms, scalars        base · (d/d_ref)^−0.5
"""

import math
import warnings
from typing import Any

from torch import nn

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.accounting import executed_parameters

from .config import ModelConfig, OptimizerConfig, TransferConfig


def reference_tokens(transfer: TransferConfig, model: ModelConfig) -> float:
    """D_ref, tokens: `tokens_per_parameter` for each executed parameter of the reference model of the same kind.

    The reference has width `reference_width` and `reference_recurrences`, or one recurrence if the model is unlooped.
    """
    intermediate = None
    if model.intermediate_size is not None:
        intermediate = model.intermediate_size * transfer.reference_width // model.hidden_size
    head_dim = math.gcd(transfer.reference_width, model.head_dim)
    reference = LoopedConfig.iso_depth(
        transfer.reference_width,
        1 if model.recurrences == 1 else transfer.reference_recurrences,
        effective_depth=model.effective_depth,
        shared_depth=model.shared_depth,
        head_dim=head_dim,
        intermediate_size=intermediate,
        injection=model.injection,
        num_lanes=model.num_lanes,
        vocab_size=1,
    )
    return transfer.tokens_per_parameter * executed_parameters(reference)


def check_batch(transfer: TransferConfig, batch_tokens: int) -> None:
    """Warn when the batch is more than 8 times away from the reference.

    The rule was measured near its reference; from 262,144 to 1,024 tokens it costs half a nat.
    """
    if abs(math.log2(batch_tokens / transfer.reference_batch_tokens)) > 3:
        warnings.warn(
            f"batch_tokens is {batch_tokens:,}, more than 8 times away from transfer.reference_batch_tokens = "
            f"{transfer.reference_batch_tokens:,}: the learning rates are not tuned there. Tune base rates near your "
            "batch and set the reference to it.",
            stacklevel=2,
        )


def learning_rates(
    optimizer: OptimizerConfig,
    transfer: TransferConfig,
    model: ModelConfig,
    batch_tokens: int,
    tokens: int,
) -> dict[str, float]:
    """Peak learning rate of each role (matrix, embedding, lm_head, norm, scalar) by the rules above.

    Warns as `check_batch` does.
    """
    check_batch(transfer, batch_tokens)
    batch = (batch_tokens / transfer.reference_batch_tokens) ** transfer.batch_exponent
    width = (model.hidden_size / transfer.reference_width) ** transfer.width_exponent
    horizon = (tokens / reference_tokens(transfer, model)) ** transfer.tokens_exponent
    return {
        "matrix": optimizer.muonh_lr * batch * horizon,
        "embedding": optimizer.embedding_lr * batch * width,
        "lm_head": optimizer.lm_head_lr * batch * width,
        "norm": optimizer.norm_lr * width,
        "scalar": optimizer.hyperconnection_lr * width,
    }


def schedule(step: int, steps: int, final_fraction: float) -> float:
    """Factor on the peak rate at step 0 ≤ step < steps: linear from 1 towards `final_fraction`, no warm-up."""
    left = (steps - step) / steps
    return left + final_fraction * (1 - left)


def parameter_groups(
    model: LoopedForCausalLM, rates: dict[str, float], optimizer: OptimizerConfig
) -> list[dict[str, Any]]:
    """Sort every parameter into a group by the role of its module; groups carry `role`, `algorithm` and `peak_lr`."""
    members: dict[str, list[nn.Parameter]] = {role: [] for role in rates}
    for name, parameter in model.named_parameters():
        members[_role(name, parameter)].append(parameter)
    return [
        {
            "params": parameters,
            "role": role,
            "algorithm": "muonh" if role == "matrix" else "adamw",
            "peak_lr": rates[role],
            "lr": rates[role],
            "momentum": optimizer.momentum,
            "betas": tuple(optimizer.betas),
            "eps": optimizer.eps,
        }
        for role, parameters in members.items()
        if parameters
    ]


def _role(name: str, parameter: nn.Parameter) -> str:
    if name.endswith("embed_tokens.weight"):
        return "embedding"
    if name.endswith("lm_head.weight"):
        return "lm_head"
    if name.endswith("norm.weight"):
        return "norm"
    if name.endswith("_proj.weight") or name.endswith("injection.proj.weight"):
        return "matrix"
    if ".injection." in name:
        return "scalar"
    raise ValueError(
        f"{name}, shape {tuple(parameter.shape)}: no learning-rate role is known for this parameter."
    )
