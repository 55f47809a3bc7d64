"""HyperP: learning rates moved from a reference point to a run's width, batch, horizon and depth.

Rules of Schwethelm et al. 2026 (arXiv:2604.21106, section 4.1), after arXiv:2603.28743. Symbols: d width, B tokens of a
batch, D tokens of the run, L executed layers. Ratios are to the reference point of `TransferConfig`, whose exponents
are given here with the paper's values:

    MuonH matrices        base · (B/B_ref)^0.558 · (D/D_ref)^−0.32 · (L/L_ref)^0
    embedding, LM head    base · (B/B_ref)^0.558 · (d/d_ref)^−0.5
    norms, scalars        base · (d/d_ref)^−0.5

An exit gate is a head that reads the state, time modulation the gain of a norm; the diagonal injection and adapters are
scalars.

The depth rule is HyperP's own (exponent −0.5, with residual branches times 1/√(2L): `model.scale_residual`).
"""

import math
import warnings
from fractions import Fraction
from typing import Any

from torch import nn

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.accounting import executed_parameters

from .config import ModelConfig, OptimizerConfig, TransferConfig


def width_factor(transfer: TransferConfig, hidden_size: int) -> float:
    """(d/d_ref)^width_exponent, for what AdamW trains."""
    return (hidden_size / transfer.reference_width) ** transfer.width_exponent


def batch_factor(transfer: TransferConfig, batch_tokens: int) -> float:
    """(B/B_ref)^batch_exponent, for matrices, embedding and LM head."""
    return (batch_tokens / transfer.reference_batch_tokens) ** transfer.batch_exponent


def horizon_factor(
    transfer: TransferConfig, model: ModelConfig | LoopedConfig, tokens: int
) -> float:
    """(D/D_ref)^tokens_exponent, for MuonH's matrices; D_ref is `reference_tokens`."""
    return (tokens / reference_tokens(transfer, model)) ** transfer.tokens_exponent


def depth_factor(transfer: TransferConfig, layers: int) -> float:
    """(L/L_ref)^depth_exponent of the executed layers, for MuonH's matrices (arXiv:2603.28743, section 3.3: −0.5)."""
    return (layers / transfer.reference_depth) ** transfer.depth_exponent


def reference_tokens(transfer: TransferConfig, model: ModelConfig | LoopedConfig) -> float:
    """D_ref, tokens: `tokens_per_parameter` for each executed parameter of the reference model of the same kind.

    That is the model itself, its depth, shape of MLP and share of key-value heads kept, with `reference_width` channels
    and, if it is looped, its shared layers in `reference_recurrences` recurrences (as they are where that leaves a
    remainder, which moves the injection's part alone).
    """
    architecture = _architecture(model)
    r = transfer.reference_recurrences
    shared = architecture.num_recurrences * architecture.num_recurrent_layers
    if architecture.num_recurrences > 1 and shared % r == 0:
        architecture = LoopedConfig.from_dict(
            architecture.to_dict(),
            num_recurrences=r,
            num_recurrent_layers=shared // r,
            num_trained_recurrences=r,
            num_backprop_recurrences=None,
        )
    # For one shape, executed parameters are a polynomial of second degree in the width: three widths give it exactly.
    one, two, three = (executed_parameters(_widened(architecture, k)) for k in (1, 2, 3))
    x = Fraction(transfer.reference_width, architecture.hidden_size)
    executed = one + (x - 1) * (two - one) + (x - 1) * (x - 2) * Fraction(three - 2 * two + one, 2)
    return transfer.tokens_per_parameter * float(executed)


def _architecture(model: ModelConfig | LoopedConfig) -> LoopedConfig:
    """Of a recipe's model; vocabulary and sequence length don't matter here."""
    return model.build(1, 2) if isinstance(model, ModelConfig) else model


def _widened(architecture: LoopedConfig, times: int) -> LoopedConfig:
    """Return the same model with so many times its channels and heads."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    wider = {name: times * getattr(architecture, name) for name in names}
    return LoopedConfig.from_dict(architecture.to_dict(), **wider)


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
    model: ModelConfig | LoopedConfig,
    batch_tokens: int,
    tokens: int,
) -> dict[str, float]:
    """Peak learning rate of each role (matrix, embedding, lm_head, norm, scalar) by the rules above.

    Warns as `check_batch` does.
    """
    check_batch(transfer, batch_tokens)
    architecture = _architecture(model)
    width = width_factor(transfer, architecture.hidden_size)
    batch = batch_factor(transfer, batch_tokens)
    horizon = horizon_factor(transfer, architecture, tokens)
    depth = depth_factor(transfer, architecture.num_hidden_layers)
    return {
        "matrix": optimizer.muonh_lr * batch * horizon * depth,
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
    """Sort every parameter into a group by the role of its module; groups carry `role`, `algorithm` and `peak_lr`.

    A projection with a single row or column is a vector: orthogonalising it would only normalise it, and shards of it
    would be empty. It goes to AdamW with the scalars, and a warning names it.
    """
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
    if name.endswith("lm_head.weight") or ".exit_gate." in name:
        return "lm_head"
    if name.endswith("norm.weight") or ".time_modulation." in name:
        return "norm"
    if name.endswith("_proj.weight") or name.endswith("injection.proj.weight"):
        if min(parameter.shape) > 1:
            return "matrix"
        warnings.warn(
            f"{name}, shape {tuple(parameter.shape)}, is a vector, not a matrix: AdamW trains it, at the rate of the "
            "scalars (optimizer.hyperconnection_lr).",
            stacklevel=3,
        )
        return "scalar"
    if ".injection." in name or ".adapter_" in name:
        return "scalar"
    raise ValueError(
        f"{name}, shape {tuple(parameter.shape)}: no learning-rate role is known for this parameter."
    )
