# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Cross entropy of soft-capped logits without the logits: values and gradients in chunks of tokens.

Shapes: N tokens, D hidden size, V vocabulary. For logits z = h·Wᵀ and the soft cap y = c·tanh(z / c), the loss of a
token with target j is log Σ exp(y) − y_j, and ∂loss/∂z = (softmax(y) − onehot(j)) · (1 − (y / c)²). The gradients with
respect to h and W are summed while a chunk's logits are there, in the forward pass, so that neither pass holds
[N, V] and nothing is computed twice (as in Liger Kernel, Hsu et al. 2024, arXiv:2410.10989; here with the cap, on any
device).
"""

import torch
from torch.nn.functional import linear

from .cpu_ops import slow_in_bfloat16

IGNORED = -100
CHUNK_BYTES = 2**23  # of one chunk's logits in float32: they stay in the cache


def chunked_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    softcap: float | None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Sum of the targets' cross entropies in nats, a float32 scalar.

    Parameters
    ----------
    hidden_states
        h, [..., D].
    weight
        W, [V, D].
    targets
        Target of each token, [...]; −100 is not scored.
    softcap
        c, or None for no cap.
    chunk_tokens
        Tokens whose logits are held at once; None: what fits into 8 MiB of float32, at least 64.

    Raises
    ------
    ValueError
        If the shapes do not fit.
    """
    if hidden_states.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets have the shape {tuple(targets.shape)}, hidden_states {tuple(hidden_states.shape)}: there must be "
            "one target for each hidden state."
        )
    if not torch.is_grad_enabled():
        hidden_states, weight = hidden_states.detach(), weight.detach()
    if torch.is_autocast_enabled(hidden_states.device.type):
        dtype = torch.get_autocast_dtype(hidden_states.device.type)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    if chunk_tokens is None:
        chunk_tokens = max(64, CHUNK_BYTES // (4 * weight.shape[0]))
    return _ChunkedCrossEntropy.apply(
        hidden_states.flatten(0, -2), weight, targets.flatten(), softcap, chunk_tokens
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss [N, D], [V, D], [N] → scalar; its gradients wait in the context for the factor from above."""

    @staticmethod
    def forward(ctx, hidden_states, weight, targets, softcap, chunk_tokens):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        loss = hidden_states.new_zeros((), dtype=torch.float32)
        hidden_gradient = torch.empty_like(hidden_states) if needs_hidden else None
        # In float32: bfloat16 would round the sum over chunks.
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        ctx.weight_dtype = weight.dtype
        if slow_in_bfloat16(weight):
            weight = weight.float()
        with torch.autocast(hidden_states.device.type, enabled=False):
            for index in range(-(-hidden_states.shape[0] // chunk_tokens)):  # one graph for a count
                part = slice(index * chunk_tokens, (index + 1) * chunk_tokens)
                chunk = hidden_states[part].to(weight.dtype)
                logits = linear(chunk, weight).float()
                slope = _cap_(logits, softcap)
                scored, target, log_normaliser = _normalise(logits, targets[part])
                losses = log_normaliser - logits.gather(1, target).squeeze(1)
                loss += torch.where(scored, losses, 0.0).sum()
                if not (needs_hidden or needs_weight):
                    continue
                gradient = _gradient_(logits, scored, target, log_normaliser, slope)
                gradient = gradient.to(weight.dtype)
                if needs_hidden:
                    hidden_gradient[part] = gradient @ weight
                if needs_weight:
                    weight_gradient += gradient.t() @ chunk
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    def backward(ctx, factor):
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "The chunked loss can't be differentiated twice; use skip_logits=False."
            )
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient * factor.to(hidden_gradient.dtype)
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * factor).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _cap_(logits: torch.Tensor, softcap: float | None) -> torch.Tensor | None:
    """Cap logits [n, V] in place; return y / c, whose square the gradient needs, or None without a cap."""
    if softcap is None:
        return None
    ratio = logits.div_(softcap).tanh_().clone()
    logits.mul_(softcap)
    return ratio


def _normalise(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which tokens are scored [n], their targets as an index [n, 1] and log Σ exp of their logits [n]."""
    scored = targets != IGNORED
    return scored, torch.where(scored, targets, 0)[:, None], torch.logsumexp(logits, dim=-1)


def _gradient_(
    logits: torch.Tensor,
    scored: torch.Tensor,
    index: torch.Tensor,
    log_normaliser: torch.Tensor,
    ratio: torch.Tensor | None,
) -> torch.Tensor:
    """Overwrite capped logits [n, V] by the gradient of the chunk's loss with respect to the logits before the cap."""
    gradient = logits.sub_(log_normaliser[:, None]).exp_()
    gradient.scatter_add_(1, index, -torch.ones_like(log_normaliser)[:, None])
    gradient.mul_(scored[:, None])
    if ratio is not None:
        gradient.mul_(ratio.square_().neg_().add_(1.0))
    return gradient
