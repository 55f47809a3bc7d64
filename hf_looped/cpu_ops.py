# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""What CPUs do slowly when composed of general operations, with gradients by hand that pass over memory less often.

Each function equals the plain expression in its docstring. Training on a CPU uses them; accelerators have fused kernels
of their own, a compiler fuses the plain expressions itself (`differentiates_on_cpu`). They have no forward-mode
derivative: take torch.func.jvp under torch.no_grad().

CPUs without bfloat16 products multiply it some eight times slower than float32 (tests/benchmarks/model.py), so bfloat16
products are taken in float32 there and rounded to bfloat16, as hardware with bfloat16 products does.

Shapes: B rows, T tokens, H heads, C head size, D hidden size, F fan-out.
"""

import torch
from torch import nn

_CAPABILITIES = torch.cpu.get_capabilities()
MULTIPLIES_BF16 = _CAPABILITIES.get("architecture") != "x86_64" or bool(
    _CAPABILITIES.get("avx512_bf16") or _CAPABILITIES.get("amx_bf16")
)
FEWEST_ROWS = 4  # of a product for which casting the weight pays
LONGEST = 1024  # tokens of a row up to which the attention below keeps its weights
BLOCK = 128  # queries of one block

exact = torch.autocast("cpu", enabled=False)  # backward may run inside a user's autocast as well


def differentiates_on_cpu(x: torch.Tensor) -> bool:
    """Whether x is differentiated on a CPU, by no compiler."""
    return torch.is_grad_enabled() and x.device.type == "cpu" and not torch.compiler.is_compiling()


class Linear(nn.Linear):
    """x·Wᵀ without bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, [..., D] → [..., F]."""
        if x.dtype is not torch.bfloat16:
            return nn.functional.linear(x, self.weight)
        return linear(x, self.weight)


def slow_in_bfloat16(x: torch.Tensor) -> bool:
    """Whether x is bfloat16 on a CPU that has no products of it."""
    return not MULTIPLIES_BF16 and x.dtype is torch.bfloat16 and x.device.type == "cpu"


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ, [..., D], [F, D] → [..., F]."""
    in_float32 = (
        slow_in_bfloat16(weight)
        and x.dtype is torch.bfloat16
        and type(weight) in (torch.Tensor, nn.Parameter)  # quantised weights multiply by themselves
        and x.numel() >= FEWEST_ROWS * x.shape[-1]
    )
    if not in_float32:
        return nn.functional.linear(x, weight)
    if differentiates_on_cpu(x):
        return _LinearInFloat32.apply(x, weight)
    return nn.functional.linear(x.float(), weight.float()).to(x.dtype)


class _LinearInFloat32(torch.autograd.Function):
    """A bfloat16 product taken in float32; what it keeps for its gradient stays bfloat16."""

    generate_vmap_rule = True

    @staticmethod
    @exact
    def forward(x, weight):
        return nn.functional.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @exact
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = gradient.float()
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = (gradient @ weight.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            weight_gradient = gradient.flatten(0, -2).t() @ x.flatten(0, -2).float()
            weight_gradient = weight_gradient.to(weight.dtype)
        return x_gradient, weight_gradient


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / √(mean(x²) + ε) over the last axis, [..., D] → [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square().mul(1.0 / x.shape[-1]).add(eps).rsqrt()


class RMSNorm(torch.autograd.Function):
    """x / √(mean(x²) + ε) · w over the last axis, [..., D], [D] → [..., D], in float32.

    With n = x / √(mean(x²) + ε), g the gradient from above: ∂x = (g·w − n·mean(g·w·n)) / √(mean(x²) + ε), ∂w = Σ g·n.
    """

    generate_vmap_rule = True

    @staticmethod
    @exact
    def forward(x, weight, eps):
        return (x * _inverse_rms(x, eps)).mul_(weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @exact
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        inverse = _inverse_rms(x, ctx.eps)
        normed = x * inverse
        product = gradient * normed
        mean = (product @ weight).div(x.shape[-1]).unsqueeze(-1)
        x_gradient = (gradient * weight).mul_(inverse).addcmul_(normed, mean * inverse, value=-1)
        return x_gradient, product.flatten(0, -2).sum(dim=0), None


class RotaryNorm(torch.autograd.Function):
    """RMSNorm without gain of the rotated heads, [B, T, H, C] → [B, H, T, C], in float32; cos, sin [B, T, 1, C/2].

    A rotation R doesn't change the norm: y = R·n with n = x / √(mean(x²) + ε), so ∂x = (Rᵀg − n·mean(g·y)) / √(…).
    """

    generate_vmap_rule = True

    @staticmethod
    @exact
    def forward(x, cos, sin, eps):
        heads, cos, sin = (part.transpose(1, 2) for part in (x, cos, sin))
        return _rotate(heads, cos, sin).mul_(_inverse_rms(heads, eps))  # contiguous, as SDPA likes

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, cos, sin, ctx.eps = inputs
        ctx.save_for_backward(x, cos, sin)

    @staticmethod
    @exact
    def backward(ctx, gradient):
        x, cos, sin = ctx.saved_tensors
        inverse = _inverse_rms(x, ctx.eps)
        back = _rotate(gradient.transpose(1, 2), cos, -sin)
        mean = (back * x).mean(dim=-1, keepdim=True)
        x_gradient = torch.addcmul(back, x, mean * inverse.square(), value=-1).mul_(inverse)
        return x_gradient, None, None, None


class Rotary(torch.autograd.Function):
    """The rotated heads, [B, T, H, C] → [B, H, T, C], in float32; cos, sin [B, T, 1, C/2]. ∂x = Rᵀg."""

    generate_vmap_rule = True

    @staticmethod
    @exact
    def forward(x, cos, sin):
        return _rotate(*(part.transpose(1, 2) for part in (x, cos, sin)))  # contiguous

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @exact
    def backward(ctx, gradient):
        cos, sin = ctx.saved_tensors
        return _rotate(gradient.transpose(1, 2), cos, -sin), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + C/2) in Llama's direction, [..., C], into new memory; cos, sin [..., C/2]."""
    first, second = x.chunk(2, dim=-1)
    turned = (first * cos).addcmul_(second, -sin), (second * cos).addcmul_(first, sin)
    return torch.cat(turned, dim=-1)


class ReluSquared(torch.autograd.Function):
    """max(x, 0)², any shape."""

    generate_vmap_rule = True

    @staticmethod
    @exact
    def forward(x):
        return x.relu().square_()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @exact
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (x.relu() * gradient).mul_(2)


def prefers_blocks(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `causal_attention` fits and beats SDPA: differentiated bfloat16 on a CPU, causal alone, not too long.

    In float32 the two are equal within a quarter (tests/benchmarks/attention.py).
    """
    return (
        query.dtype is torch.bfloat16
        and differentiates_on_cpu(query)
        and mask is None
        and 1 < query.shape[2] == key.shape[2] <= LONGEST
    )


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> torch.Tensor:
    """softmax(q·kᵀ·scaling + causal mask)·v, [B, H, T, C] each → [B, T, H, C]."""
    shape = query.shape
    heads = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    return _CausalAttention.apply(*heads, scaling).view(shape).transpose(1, 2)


class _CausalAttention(torch.autograd.Function):
    """Attention in blocks of queries, each over the keys before its end, [B·H, T, C] each.

    Half of the products that a full mask takes are left out; the weights [B·H, block, keys] are kept for the gradient.
    """

    @staticmethod
    @exact
    def forward(ctx, query, key, value, scaling):
        dtype = query.dtype if MULTIPLIES_BF16 else torch.float32
        q, k, v = (x.to(dtype) for x in (query * scaling, key, value))
        length = q.shape[1]
        output, weights = torch.empty_like(v), []
        ahead = torch.full((BLOCK, BLOCK), float("-inf"), dtype=dtype).triu(1)
        for start in range(0, length, BLOCK):
            end = min(start + BLOCK, length)
            scores = torch.bmm(q[:, start:end], k[:, :end].transpose(1, 2))
            scores[:, :, start:] += ahead[: end - start, : end - start]
            weights.append(scores.softmax(dim=-1))
            output[:, start:end] = torch.bmm(weights[-1], v[:, :end])
        ctx.save_for_backward(query, key, value, *weights)
        ctx.scaling = scaling
        return output.to(query.dtype)

    @staticmethod
    @exact
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "This attention can't be differentiated twice; use attn_implementation='eager'."
            )
        query, key, value, *weights = ctx.saved_tensors
        dtype = weights[0].dtype
        q, k, v, g = (x.to(dtype) for x in (query * ctx.scaling, key, value, gradient))
        q_gradient = torch.empty_like(q)
        k_gradient, v_gradient = torch.zeros_like(k), torch.zeros_like(v)
        for index, weight in enumerate(weights):
            start, end = index * BLOCK, index * BLOCK + weight.shape[1]
            above = g[:, start:end]
            v_gradient[:, :end].baddbmm_(weight.transpose(1, 2), above)
            scores = torch.bmm(above, v[:, :end].transpose(1, 2))
            scores = torch._softmax_backward_data(scores, weight, -1, dtype)
            q_gradient[:, start:end] = torch.bmm(scores, k[:, :end])
            k_gradient[:, :end].baddbmm_(scores.transpose(1, 2), q[:, start:end])
        q_gradient *= ctx.scaling
        return *(x.to(query.dtype) for x in (q_gradient, k_gradient, v_gradient)), None
