# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Looped (depth-recurrent) transformer: prelude, a shared block run r times, coda.

Equations are those of Schwethelm et al. 2026 (arXiv:2604.21106); README.md in this folder lists them.

Shapes: B rows, T new tokens, S cached + new tokens, D hidden size, H heads, G key/value heads, C head size,
V vocabulary, K lanes. Slots of the cache, one per layer call: prelude, coda, recurrence 0, recurrence 1, …, so that a
larger r only appends slots; with a budget of m cached recurrences, recurrence t uses the slots of recurrence t mod m.
"""

import copy
import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, StaticLayer
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import (
    ALL_ATTENTION_FUNCTIONS,
    PreTrainedModel,
    slice_logits_to_keep,
)
from transformers.processing_utils import Unpack
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import (
    TransformersKwargs,
    can_return_tuple,
    maybe_autocast,
    merge_with_config_defaults,
)
from transformers.utils.output_capturing import capture_outputs

from .adapters import AdaptedLinear, project
from .adaptive_depth import ActiveTokens, AdaptiveDepth, divergence, relative_change
from .chunked_loss import IGNORED, chunked_cross_entropy
from .configuration_looped import TIME_FEATURES, LoopedConfig
from .cpu_ops import (
    Linear,
    ReluSquared,
    RMSNorm,
    Rotary,
    RotaryNorm,
    causal_attention,
    differentiates_on_cpu,
    linear,
    prefers_blocks,
)
from .objectives import exit_log_probabilities, exit_loss, squared_distance

Predict = Callable[[torch.Tensor], torch.Tensor]
MatrixFactory = Callable[[int, int], nn.Module]  # of input and output size


@dataclass
class LoopedModelOutput(BaseModelOutputWithPast):
    """Output of `LoopedModel`.

    recurrent_states: with `output_recurrent_states`, r tensors [B, T, D], what the coda would read after each
    recurrence (the state h(t + 1), normed if the model norms it; with hyperconnections the lanes' sum).
    recurrences_used: with `adaptive_depth`, the recurrences of each token, [B, T].
    exit_hidden_states, exit_log_probabilities: with `output_exits`, what the LM head would read after each recurrence,
    r tensors [B, T, D], and the log of the probability to stop there, [B, T, r].
    shortcut_hidden_state: with `shortcut_recurrences`, what the LM head would read after so many, [B, T, D].
    """

    recurrent_states: tuple[torch.Tensor, ...] | None = None
    recurrences_used: torch.Tensor | None = None
    exit_hidden_states: tuple[torch.Tensor, ...] | None = None
    exit_log_probabilities: torch.Tensor | None = None
    shortcut_hidden_state: torch.Tensor | None = None


@dataclass
class LoopedCausalLMOutput(CausalLMOutputWithPast):
    """Output of `LoopedForCausalLM`; recurrent_states and recurrences_used as in `LoopedModelOutput`."""

    recurrent_states: tuple[torch.Tensor, ...] | None = None
    recurrences_used: torch.Tensor | None = None


class LoopedRMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight, over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float()
        if differentiates_on_cpu(x):
            return RMSNorm.apply(x.float(), weight, self.eps).to(x.dtype)
        return nn.functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class LoopedRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary embedding, computed in float32 (θ = 10,000 in the paper)."""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        init_function: Callable = self.compute_default_rope_parameters
        if self.rope_type != "default":
            init_function = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init_function(config)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.original_inv_freq = nn.Buffer(inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: LoopedConfig, **kwargs
    ) -> tuple[torch.Tensor, float]:
        """Inverse frequencies θ^(−2i/C), i < C/2, [C/2], and the factor on cosines and sines (1)."""
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        return config.rope_parameters["rope_theta"] ** -exponents, 1.0

    def _apply(self, fn, recurse=True):
        """Move the buffers, but don't round them: `model.bfloat16()` would turn far positions by radians."""
        kept = {name: getattr(self, name) for name in ("inv_freq", "original_inv_freq")}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            if getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @dynamic_rope_update
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos, sin [B, T, C] in the dtype of x for positions [B, T]."""
        with maybe_autocast(device_type=x.device.type, enabled=False):
            inv_freq = self.inv_freq.float().to(x.device)
            angles = position_ids[..., None].float() * inv_freq  # [B, T, C/2]
            angles = torch.cat((angles, angles), dim=-1)
            cos = angles.cos() * self.attention_scaling
            sin = angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate_and_normalise(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float | None
) -> torch.Tensor:
    """Rotate pairs (i, i + C/2) in Llama's direction by the angles of cos, sin [B, T, C], then RMSNorm without gain.

    [B, T, H, C] → [B, H, T, C], computed in float32. eps: None rotates alone.
    """
    dtype, x = x.dtype, x.float()
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    if differentiates_on_cpu(x):
        half = x.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
        if eps is None:
            return Rotary.apply(x, cos, sin).to(dtype)
        return RotaryNorm.apply(x, cos, sin, eps).to(dtype)
    first, second = x.chunk(2, dim=-1)
    turned = (x * cos + torch.cat((-second, first), dim=-1) * sin).transpose(1, 2)
    if eps is None:
        return turned.to(dtype)
    return nn.functional.rms_norm(turned, x.shape[-1:], eps=eps).to(dtype)


def repeat_kv(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat each key/value head for its group of query heads, [B, G, S, C] → [B, H, S, C]."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by plain batched products: softmax(q·kᵀ·scaling + mask)·v, [B, H, T, C] → [B, T, H, C].

    The softmax sums in float32 whatever the dtype of its input.
    """
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query * scaling, key.transpose(2, 3))  # [B, H, T, S]
    if attention_mask is not None:
        scores = scores + attention_mask.to(scores.dtype)
    weights = nn.functional.softmax(scores, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def blockwise_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Causal attention where it beats SDPA (`cpu_ops.prefers_blocks`), [B, H, T, C] → [B, T, H, C]."""
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    return causal_attention(query, key, value, scaling), None


def update_cache(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, slot: int, keep: bool, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put new keys and values [B, G, T, C] into a slot; return all that it holds, [B, G, S, C] each.

    Without `keep` they are taken out again, for a later recurrence to write. The paged cache of `generate_batch` has
    a fixed place for each token, which the later recurrence overwrites.
    """
    if not isinstance(cache, Cache):
        return cache.update(key, value, slot, kwargs=kwargs)
    while len(cache.layers) <= slot:  # a cache that grows by itself; `_check_cache` refuses others
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[slot]
    held = {} if keep else dict(vars(layer))
    if cache.offloading:
        layer.prefetch()  # the cache itself fetches slot + 1 ahead, but the coda is called last
    keys, values = cache.update(key, value, slot, kwargs=kwargs)
    if not keep:
        if isinstance(layer, StaticLayer):  # written in place, and written over by the next update
            layer.crop(-key.shape[-2])
        else:  # growing layers replace their tensors
            vars(layer).update(held)
    return keys, values


class LoopedAttention(nn.Module):
    """Causal grouped-query attention with rotary embedding and, with `qk_norm`, QK-norm without gain (Table 4)."""

    def __init__(self, config: LoopedConfig, layer_idx: int, matrix: MatrixFactory):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.eps = config.rms_norm_eps if config.qk_norm else None
        self.is_causal = True
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = matrix(config.hidden_size, width)
        self.k_proj = matrix(config.hidden_size, kv_width)
        self.v_proj = matrix(config.hidden_size, kv_width)
        self.o_proj = matrix(width, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        slot_offset: int = 0,
        keep: bool = True,
        recurrence: int = 0,
        active: ActiveTokens | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend. hidden_states [B, T, D] → [B, T, D], weights [B, H, T, S] where the implementation has them.

        slot_offset is added to the layer's own slot; keep says whether this call's keys and values stay in the cache.
        recurrence chooses the adapters. active: the tokens at hand, where others have stopped early.
        """
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = project(self.q_proj, hidden_states, recurrence)
        key = project(self.k_proj, hidden_states, recurrence)
        groups = key.shape[-1] // self.head_dim  # G, or the share of it on this device
        both = torch.cat((query, key), dim=-1).view(heads)  # [B, T, H + G, C]
        both = rotate_and_normalise(both, *position_embeddings, self.eps)
        query, key = both.split((both.shape[1] - groups, groups), dim=1)  # [B, H or G, T, C]
        value = project(self.v_proj, hidden_states, recurrence).view(heads).transpose(1, 2)
        if active is not None:
            key, value = active.complete(self.layer_idx, key, value)
        if cache is not None:
            slot = self.layer_idx + slot_offset
            key, value = update_cache(cache, key, value, slot, keep, kwargs)
        if active is not None:
            key, value = active.rows_of(key), active.rows_of(value)
        implementation = self.config._attn_implementation
        dropout = self.attention_dropout if self.training else 0.0
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if implementation == "sdpa" and not dropout and kwargs.get("is_causal") is None:
            if prefers_blocks(query, key, attention_mask):
                attend = blockwise_attention_forward
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return project(self.o_proj, output, recurrence), weights


class LoopedMLP(nn.Module):
    """Down(act(Up(x))), squared ReLU in the paper; with `gated_mlp` Down(act(Gate(x)) · Up(x)), as in Llama."""

    def __init__(self, config: LoopedConfig, matrix: MatrixFactory):
        super().__init__()
        self.gated = config.gated_mlp
        if self.gated:
            self.gate_proj = matrix(config.hidden_size, config.intermediate_size)
        self.up_proj = matrix(config.hidden_size, config.intermediate_size)
        self.down_proj = matrix(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.squared_relu = config.hidden_act == "relu2"

    def forward(self, x: torch.Tensor, recurrence: int = 0) -> torch.Tensor:
        up = project(self.up_proj, x, recurrence)
        if self.gated:
            hidden = self._activate(project(self.gate_proj, x, recurrence)) * up
        else:
            hidden = self._activate(up)
        return project(self.down_proj, hidden, recurrence)

    def _activate(self, hidden: torch.Tensor) -> torch.Tensor:
        if differentiates_on_cpu(hidden) and self.squared_relu:
            return ReluSquared.apply(hidden)
        return self.act_fn(hidden)


class LoopedDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block: x + m·Attn(RMSNorm(x)), then x + m·MLP(RMSNorm(x)), m the `residual_multiplier`.

    With a modulation (σ₁, γ₁, σ₂, γ₂), [4, D], it is x + m·(1 + γ₁)·Attn((1 + σ₁)·RMSNorm(x)), and so on for the MLP.
    """

    def __init__(self, config: LoopedConfig, layer_idx: int, matrix: MatrixFactory):
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.self_attn = LoopedAttention(config, layer_idx, matrix)
        self.mlp = LoopedMLP(config, matrix)
        self.input_layernorm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        recurrence: int = 0,
        modulation: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Apply the block, [B, T, D] → [B, T, D]."""
        m = self.residual_multiplier
        normed = self.input_layernorm(hidden_states)
        if modulation is not None:
            normed = normed * (1 + modulation[0])
        attention, _ = self.self_attn(normed, cache=cache, recurrence=recurrence, **kwargs)
        if modulation is not None:
            attention = attention * (1 + modulation[1])
        hidden_states = torch.add(hidden_states, attention, alpha=m)
        normed = self.post_attention_layernorm(hidden_states)
        if modulation is not None:
            normed = normed * (1 + modulation[2])
        mlp = self.mlp(normed, recurrence)
        if modulation is not None:
            mlp = mlp * (1 + modulation[3])
        return torch.add(hidden_states, mlp, alpha=m)


class TimeModulation(nn.Linear):
    """Modulation of a shared layer by time t/r and step size 1/r: [4, D], initially 0 (LoopFormer, arXiv:2602.11451).

    A linear function of cos and sin of π and 2π times both.
    """

    def __init__(self, config: LoopedConfig):
        super().__init__(TIME_FEATURES, 4 * config.hidden_size, bias=False)

    def forward(self, t: int, r: int) -> torch.Tensor:
        angles = [torch.pi * k * x for x in (t / r, 1 / r) for k in (1, 2)]
        features = [function(angle) for angle in angles for function in (math.cos, math.sin)]
        weight = self.weight
        return nn.functional.linear(weight.new_tensor(features), weight).view(4, -1)


# Injections share one interface: `start` makes what recurrences carry from the initial state, `read` gives the block's
# input at recurrence t, `write` takes the block's (normed) output back, `finish` gives the coda's input.


class PassthroughInjection(nn.Module):
    """u(t) = h(t): the prelude's output e is the initial state and is not seen again (Table 5)."""

    def __init__(self, config: LoopedConfig):
        super().__init__()

    def start(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def read(self, carried: torch.Tensor, e: torch.Tensor, t: int) -> torch.Tensor:
        return carried

    def write(self, carried: torch.Tensor, output: torch.Tensor, t: int) -> torch.Tensor:
        return output

    def finish(self, carried: torch.Tensor) -> torch.Tensor:
        return carried


class AdditiveInjection(PassthroughInjection):
    """u(t) = h(t) + e (Table 5)."""

    def read(self, carried: torch.Tensor, e: torch.Tensor, t: int) -> torch.Tensor:
        return carried + e


class InjectionProjection(Linear):
    """W of the linear injection, a class of its own for its initialisation [I ‖ 0]."""


class LinearInjection(PassthroughInjection):
    """u(t) = W·[e ‖ h(t)], W [D, 2·D], initially [I ‖ 0] (eq. 5)."""

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.proj = InjectionProjection(2 * config.hidden_size, config.hidden_size, bias=False)

    def read(self, carried: torch.Tensor, e: torch.Tensor, t: int) -> torch.Tensor:
        return self.proj(torch.cat((e, carried), dim=-1))


class DiagonalInjection(PassthroughInjection):
    """u(t) = a ⊙ h(t) + b ⊙ e, a = exp(−Δ·exp(log A)), so that 0 < a < 1 (Parcae, arXiv:2604.12946).

    log A, b and the inverse softplus of the step Δ are weights, [D] each. Initially a = b = 1/2.
    """

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.log_rate = nn.Parameter(torch.empty(config.hidden_size))
        self.step = nn.Parameter(torch.empty(config.hidden_size))
        self.gain = nn.Parameter(torch.empty(config.hidden_size))

    def read(self, carried: torch.Tensor, e: torch.Tensor, t: int) -> torch.Tensor:
        rate = nn.functional.softplus(self.step.float()) * self.log_rate.float().exp()
        return torch.exp(-rate).to(carried.dtype) * carried + self.gain.to(e.dtype) * e


class HyperconnectionsInjection(PassthroughInjection):
    """K residual lanes ℓ: u = α·ℓ, ℓ ← M·ℓ + β ⊗ s, with α, M, β for each recurrence (section 5.2).

    Lanes are carried as [K, B, T, D]. Initially α(t) = one-hot(t mod K), M = I, β = 1; the coda reads the lanes' sum.
    """

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        r, self.num_lanes = config.num_trained_recurrences, config.num_lanes
        self.alpha = nn.Parameter(torch.empty(r, self.num_lanes))
        self.mixing = nn.Parameter(torch.empty(r, self.num_lanes, self.num_lanes))
        self.beta = nn.Parameter(torch.empty(r, self.num_lanes))

    def start(self, state: torch.Tensor) -> torch.Tensor:
        return state.expand(self.num_lanes, *state.shape)

    def read(self, carried: torch.Tensor, e: torch.Tensor, t: int) -> torch.Tensor:
        return torch.einsum("k,kbtd->btd", self.alpha[t].to(carried.dtype), carried)

    def write(self, carried: torch.Tensor, output: torch.Tensor, t: int) -> torch.Tensor:
        mixed = torch.einsum("jk,kbtd->jbtd", self.mixing[t].to(carried.dtype), carried)
        return mixed + self.beta[t].to(carried.dtype)[:, None, None, None] * output

    def finish(self, carried: torch.Tensor) -> torch.Tensor:
        return carried.sum(dim=0)


INJECTIONS = {
    "linear": LinearInjection,
    "additive": AdditiveInjection,
    "passthrough": PassthroughInjection,
    "diagonal": DiagonalInjection,
    "hyperconnections": HyperconnectionsInjection,
}


class ExitGate(nn.Linear):
    """Logit of the probability of stopping after a recurrence, [B, T, D] → [B, T]; initially 0 (Ouro)."""

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return super().forward(state).squeeze(-1).float()


def position_noise(position_ids: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """N(0, 1) noise that is a function of seed, position and channel alone, [B, T] → [B, T, size], float32.

    Counter-based, so that a token gets the same initial state with and without cache, padding or batch: the
    finaliser of MurmurHash3 (Appleby, public domain) over the counters gives uniform bits, Box–Muller the normals.
    """
    channels = torch.arange(2 * size, device=position_ids.device)
    counter = position_ids[..., None].long() * (2 * size) + channels
    bits = _mix64(_mix64(counter) ^ seed)
    uniform = ((bits >> 40) & 0xFFFFFF).float().add_(0.5) * 2.0**-24  # 24 bits, in (0, 1]
    radius, angle = uniform.chunk(2, dim=-1)
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * torch.pi * angle)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """Bijective mixing of 64-bit integers; products wrap around, shifts are made logical by the mask."""
    mask = (1 << 31) - 1
    x = (x ^ ((x >> 33) & mask)) * -0xAE502812AA7333  # 0xFF51AFD7ED558CCD as a signed integer
    x = (x ^ ((x >> 33) & mask)) * -0x3B314601E57A13AD  # 0xC4CEB9FE1A85EC53
    return x ^ ((x >> 33) & mask)


class LoopedLMHead(nn.Linear):
    """LM head, initialised N(0, 0.001²); with targets it gives their loss instead of logits."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        targets: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Logits [B, T, V], or with targets [B, T] the sum of their cross entropies in nats, a scalar.

        Both in this one place, so that whatever gathers the weight before `forward` (FSDP) does it for the loss too.
        """
        if targets is None:
            return linear(hidden_states, self.weight)
        return chunked_cross_entropy(hidden_states, self.weight, targets, softcap)


class LoopedPreTrainedModel(PreTrainedModel):
    """Initialisation and capabilities shared by the looped models."""

    config: LoopedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LoopedDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LoopedDecoderLayer, "attentions": LoopedAttention}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a checkpoint as in Transformers, but refuse one whose weights are not this model's.

        Raises
        ------
        ValueError
            If weights are missing, or are there that the model doesn't have (an LM head besides: LoopedModel loads
            checkpoints of LoopedForCausalLM), or their sizes are others. `output_loading_info=True` loads the former
            and returns what was wrong, `ignore_mismatched_sizes=True` the latter.
        """
        asked = kwargs.pop("output_loading_info", False)
        mismatched = kwargs.pop("ignore_mismatched_sizes", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path,
            *args,
            output_loading_info=True,
            ignore_mismatched_sizes=mismatched or not asked,
            **kwargs,
        )
        if asked:
            return model, info
        if not mismatched:
            _check_sizes(pretrained_model_name_or_path, info)
        if pretrained_model_name_or_path is not None:
            _check_keys(pretrained_model_name_or_path, info)
        return model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as in the paper's appendix C: matrices U(−a, a) with standard deviation 1/√fan_in."""
        scale = self.config.initializer_range
        if isinstance(module, InjectionProjection):
            d = self.config.hidden_size
            init.copy_(module.weight, torch.cat((torch.eye(d), torch.zeros(d, d)), dim=1))
        elif isinstance(module, LoopedLMHead):
            init.normal_(module.weight, mean=0.0, std=0.001 * scale)
        elif isinstance(module, HyperconnectionsInjection):
            r, lanes = module.alpha.shape
            init.copy_(module.alpha, torch.eye(lanes)[torch.arange(r) % lanes])
            init.copy_(module.mixing, torch.eye(lanes).expand(r, lanes, lanes))
            init.ones_(module.beta)
        elif isinstance(module, DiagonalInjection):
            init.zeros_(module.log_rate)
            init.zeros_(module.step)  # Δ = softplus(0) = log 2
            init.constant_(module.gain, 0.5)
        elif isinstance(module, (TimeModulation, ExitGate)):
            init.zeros_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=scale)
        elif isinstance(module, nn.Linear):
            bound = scale * (3.0 / module.in_features) ** 0.5
            init.uniform_(module.weight, -bound, bound)
            if isinstance(module, AdaptedLinear):
                init.uniform_(module.adapter_down, -bound, bound)
                init.zeros_(module.adapter_up)
        else:
            super()._init_weights(module)


def _check_keys(name: str, info: dict) -> None:
    """Refuse a checkpoint with missing or unexpected weights, given the loading info of Transformers."""
    wrong = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(set(info["unexpected_keys"]) - {"lm_head.weight"}),
    }
    found = "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in wrong.items() if keys)
    if found:
        raise ValueError(
            f"{name} does not hold this model's weights ({found}). Check that the config belongs to the checkpoint, or "
            "load it with output_loading_info=True, which initialises missing weights anew."
        )


def _check_sizes(name: str | None, info: dict) -> None:
    """Refuse a checkpoint with weights of other sizes, given the loading info of Transformers."""
    found = "; ".join(
        f"{key} is {list(there)}, here {list(here)}"
        for key, there, here in sorted(info["mismatched_keys"])
    )
    if found:
        raise ValueError(
            f"{name} has weights of other sizes than its config asks for ({found}). Check that the config belongs to "
            "the checkpoint and which of its fields were replaced, or initialise them anew: "
            "ignore_mismatched_sizes=True."
        )


class LoopedModel(LoopedPreTrainedModel):
    """Looped transformer without LM head: tokens [B, T] → hidden states [B, T, D]."""

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_norm = _optional_norm(config, config.embedding_norm)
        first_coda, first_recurrent = (
            config.num_prelude_layers,
            config.num_prelude_layers + config.num_coda_layers,
        )
        plain = partial(Linear, bias=False)
        shared: MatrixFactory = plain
        if config.adapter_rank is not None:
            shared = partial(
                AdaptedLinear, rank=config.adapter_rank, recurrences=config.num_trained_recurrences
            )
        layers = partial(_layers, config)
        self.prelude = layers(config.num_prelude_layers, first_slot=0, matrix=plain)
        self.recurrent = layers(config.num_recurrent_layers, first_recurrent, matrix=shared)
        self.coda = layers(config.num_coda_layers, first_slot=first_coda, matrix=plain)
        self.injection = INJECTIONS[config.injection](config)
        if config.time_conditioning:
            self.time_modulation = nn.ModuleList(TimeModulation(config) for _ in self.recurrent)
        if config.exit_gate:
            self.exit_gate = ExitGate(config.hidden_size, 1)
        self.recurrent_norm = _optional_norm(config, config.recurrent_norm)
        self.norm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LoopedRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        num_recurrences: int | None = None,
        output_recurrent_states: bool = False,
        adaptive_depth: AdaptiveDepth | None = None,
        predict: Predict | None = None,
        output_exits: bool = False,
        shortcut_recurrences: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LoopedModelOutput:
        """Run prelude, r recurrences and coda.

        Parameters
        ----------
        input_ids, inputs_embeds
            Tokens [B, T] or embeddings [B, T, D], exactly one of them.
        attention_mask, position_ids, cache
            As in every Transformers decoder; rows with several documents are separated by `position_ids` that start
            again at 0, if neither mask nor cache is given. With left padding, a `state_init` of "normal" needs the
            positions of each row (`generate` gives them). Every call on one cache must run enough recurrences to fill
            the slots that later calls read; keys that a call with fewer recurrences finds stay those of more.
        use_cache
            Make and return a cache (None: the config's). While gradients are recorded in training none is made.
        num_recurrences
            r of this call; None: the config's.
        output_recurrent_states
            Return the state after each recurrence.
        adaptive_depth
            Let tokens or rows stop before the last recurrence (in eval mode); returns `recurrences_used`.
        predict
            Log-probabilities [B, T, V] of what the LM head would read, [B, T, D]; for the criterion "kl".
        output_exits
            Return what the LM head would read after each recurrence, and the exit gate's probabilities.
        shortcut_recurrences
            Return also what the LM head would read after that many recurrences of r/s times the step size (for models
            with `time_conditioning`).

        Raises
        ------
        ValueError
            If both or neither of `input_ids` and `inputs_embeds` are given, shapes do not fit, a token id or r is out
            of range, the cache is too short or was filled with fewer recurrences, or the model lacks what an argument
            needs (an exit gate, time conditioning).
        """
        r = self.recurrences(num_recurrences)
        self._check_training_arguments(r, output_exits, shortcut_recurrences, cache)
        inputs_embeds = self._embed(input_ids, inputs_embeds)
        given_cache, given_positions, seen = cache, position_ids, 0
        if isinstance(cache, Cache):  # unlike generate_batch's, which comes with mask and positions
            seen = cache.get_seq_length()
            self._check_cache(cache, r, seen, inputs_embeds.shape[1])
        elif use_cache and cache is None and not (self.training and torch.is_grad_enabled()):
            cache = DynamicCache()  # grows by a slot at each layer's first call, whatever r
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
            position_ids = position_ids.unsqueeze(0)
        growing = cache is None or isinstance(cache, DynamicCache)
        _check_shapes(inputs_embeds, attention_mask, position_ids, seen if growing else None)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            # Documents are looked for in given positions, and only where there is no cache: one made here is empty.
            cache=given_cache,
            position_ids=given_positions,
        )
        kwargs |= {
            "attention_mask": mask,
            "position_ids": position_ids,
            "position_embeddings": self.rotary_emb(inputs_embeds, position_ids),
        }
        e = self.embed_norm(inputs_embeds)
        for layer in self.prelude:
            e = layer(e, cache=cache, **kwargs)
        used = None
        if adaptive_depth is None:
            every = output_recurrent_states or output_exits
            states = self._recur(e, r, cache, every, **kwargs)
        else:
            self._check_adaptive(adaptive_depth, predict, output_recurrent_states, cache)
            padding = None
            if _is_2d(attention_mask):  # which may reach further than the new tokens
                padding = attention_mask[:, int(seen) : int(seen) + e.shape[1]] == 0
            state, used = self._recur_adaptively(
                e, r, cache, adaptive_depth, predict, padding, seen, **kwargs
            )
            states = (state,)
        exits = gates = shortcut = None
        if output_exits:
            exits = tuple(self._coda(state, None, **kwargs) for state in states)
            gates = torch.stack([self.exit_gate(state) for state in states], dim=-1)
        if shortcut_recurrences is not None:
            (state,) = self._recur(e, shortcut_recurrences, None, False, **kwargs)
            shortcut = self._coda(state, None, **kwargs)
        return LoopedModelOutput(
            last_hidden_state=self._coda(states[-1], cache, **kwargs)
            if exits is None
            else exits[-1],
            cache=cache,
            recurrent_states=states if output_recurrent_states else None,
            recurrences_used=used,
            exit_hidden_states=exits,
            exit_log_probabilities=None if gates is None else exit_log_probabilities(gates),
            shortcut_hidden_state=shortcut,
        )

    def _coda(self, state: torch.Tensor, cache: Cache | None, **kwargs) -> torch.Tensor:
        """Apply the coda and the last norm: what the LM head reads, [B, T, D] → [B, T, D]."""
        for layer in self.coda:
            state = layer(state, cache=cache, **kwargs)
        return self.norm(state)

    def _embed(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """Embeddings [B, T, D] of whichever input is given."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Exactly one of input_ids and inputs_embeds must be given.")
        if inputs_embeds is not None:
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
                raise ValueError(
                    f"inputs_embeds has the shape {tuple(inputs_embeds.shape)}: [B, T, {self.config.hidden_size}] "
                    "(rows, tokens, hidden_size) is needed."
                )
            return inputs_embeds
        if input_ids.ndim != 2:
            raise ValueError(
                f"input_ids has the shape {tuple(input_ids.shape)}: [B, T] (rows, tokens) is needed; input_ids[None] "
                "makes a row of single tokens."
            )
        try:
            return self.embed_tokens(input_ids)
        except IndexError as error:
            raise ValueError(
                f"input_ids holds {input_ids.min()} to {input_ids.max()}: ids must lie in "
                f"0..{self.config.vocab_size - 1} (vocab_size − 1). Does the tokenizer belong to this model?"
            ) from error

    def _recur(
        self, e: torch.Tensor, r: int, cache: Cache | None, every_state: bool, **kwargs
    ) -> tuple[torch.Tensor, ...]:
        """Run the shared block r times from the prelude's output e; return the last state or every one, [B, T, D] each.

        Recurrences before the last `backprop_recurrences` are not recorded for differentiation (truncated BPTT), those
        before the last `cached_recurrences` not kept in the cache.
        """
        truncated = (
            r - self.config.backprop_recurrences if self.training and self.config.truncated else 0
        )
        carried = self.injection.start(self._initial_state(e, kwargs["position_ids"]))
        states = []
        for t in range(r):
            with _without_gradient(e.device.type) if t < truncated else nullcontext():
                carried = self._recurrence(carried, e, t, r, cache, **kwargs)
            if every_state or t == r - 1:
                states.append(self.injection.finish(carried))
        return tuple(states)

    def _recurrence(
        self, carried: torch.Tensor, e: torch.Tensor, t: int, r: int, cache: Cache | None, **kwargs
    ) -> torch.Tensor:
        """Run the shared block once, as recurrence t of r."""
        hidden_states = self.injection.read(carried, e, t)
        for index, layer in enumerate(self.recurrent):
            if self.config.time_conditioning:
                kwargs["modulation"] = self.time_modulation[index](t, r)
            hidden_states = layer(
                hidden_states, cache=cache, recurrence=t, **self._slots(t, r), **kwargs
            )
        return self.injection.write(carried, self.recurrent_norm(hidden_states), t)

    def _slots(self, t: int, r: int) -> dict:
        """Where recurrence t of r finds its slots, and whether it leaves its keys and values there."""
        cached = self.config.cached_recurrences(r)
        return {"slot_offset": t % cached * len(self.recurrent), "keep": t >= r - cached}

    def _recur_adaptively(
        self,
        e: torch.Tensor,
        r: int,
        cache: Cache | None,
        depth: AdaptiveDepth,
        predict: Predict | None,
        padding: torch.Tensor | None,
        seen: int,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run up to r recurrences, each on the tokens that have not stopped; return the last states and counts used.

        e, states: [B, T, D]; counts, padding: [B, T].
        """
        masks = {name: kwargs.pop(name) for name in ("attention_mask", "position_ids")}
        room = cache.layers[0].get_max_length() if cache is not None and cache.layers else -1
        length = room if room >= 0 else seen + e.shape[1]
        masks |= {"mask": masks.pop("attention_mask"), "seen": seen, "length": length}
        masks["position_embeddings"] = kwargs.pop("position_embeddings")
        active = ActiveTokens(e.shape[:2], e.device)
        carried = self.injection.start(self._initial_state(e, masks["position_ids"]))
        state = self.injection.finish(carried)  # [B, T, D]
        used = e.new_zeros(e.shape[:2], dtype=torch.long)
        left = e.new_zeros((*e.shape[:2], 1), dtype=torch.float)  # log Π (1 − λ) of the gate
        predicted = None
        for t in range(r):
            if not active:
                self._fill_slots(active, t, r, cache)
                continue
            inputs = active.inputs(**masks) | kwargs | {"active": active}
            part = self._recurrence(active.select(carried), active.select(e), t, r, cache, **inputs)
            used = active.put(used[..., None], active.select(used[..., None]) + 1)[..., 0]
            new, old = self.injection.finish(part), active.select(state)
            carried, state = active.put(carried, part), active.put(state, new)
            if t == r - 1 or depth.threshold == 0:
                continue
            if depth.criterion == "change":
                measure = relative_change(new, old)
            elif depth.criterion == "gate":
                stay = (
                    active.select(left) + nn.functional.logsigmoid(-self.exit_gate(new))[..., None]
                )
                left, measure = active.put(left, stay), stay[..., 0].exp()
            else:
                scores = predict(self._coda(new, cache, keep=False, **inputs))
                if predicted is None:
                    predicted, measure = scores, torch.full_like(scores[..., 0], torch.inf)
                else:
                    measure = divergence(scores, active.select(predicted))
                    predicted = active.put(predicted, scores)
            outside = None if padding is None else active.select(padding[..., None])[..., 0]
            active.stop(depth.stops(measure, outside))
        depth.used.append(used)
        return state, used

    def _fill_slots(self, active: ActiveTokens, t: int, r: int, cache: Cache | None) -> None:
        """Leave the last keys and values of all tokens in the slots of recurrence t, which no token runs."""
        slots = self._slots(t, r)
        if cache is None or not slots["keep"]:
            return
        for layer in self.recurrent:
            attention = layer.self_attn
            slot = attention.layer_idx + slots["slot_offset"]
            update_cache(cache, *active.kept(attention.layer_idx), slot, True, {})

    def _initial_state(self, e: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """h(0), [B, T, D]."""
        kind = self.config.initial_state
        if kind == "prelude":
            return e
        if kind == "zeros":
            return torch.zeros_like(e)
        if self.training:
            return torch.randn_like(e)
        return (
            position_noise(position_ids, e.shape[-1], self.config.state_seed)
            .to(e.dtype)
            .expand_as(e)
        )

    def recurrences(self, asked: int | None) -> int:
        """Validate r of a call, None meaning the config's."""
        r = self.config.num_recurrences if asked is None else asked
        if isinstance(r, bool) or not isinstance(r, int):
            raise ValueError(f"num_recurrences is {r!r}: a whole number is needed.")
        if r < 1:
            raise ValueError(f"num_recurrences is {r}: at least one recurrence is needed.")
        if self.config.has_recurrence_tables and r > self.config.num_trained_recurrences:
            kind = "hyperconnections" if self.config.injection == "hyperconnections" else "adapters"
            raise ValueError(
                f"num_recurrences is {r}, but this model has {kind} for "
                f"{self.config.num_trained_recurrences} recurrences (num_trained_recurrences). Ask for at most that "
                "many."
            )
        return r

    def _check_training_arguments(
        self, r: int, output_exits: bool, shortcut: int | None, cache: Cache | None
    ) -> None:
        """Refuse exits without a gate, and shortcuts without time conditioning or of no fewer recurrences."""
        if output_exits and not self.config.exit_gate:
            raise ValueError(
                "output_exits needs a model with exit_gate=True; this one has no gate."
            )
        if (output_exits or shortcut is not None) and cache is not None:
            raise ValueError(
                "output_exits and shortcut_recurrences are for training: leave cache out, they would fill it twice."
            )
        if shortcut is None:
            return
        if not self.config.time_conditioning:
            raise ValueError(
                f"shortcut_recurrences is {shortcut}, but the model doesn't know its step size: it needs "
                "time_conditioning=True."
            )
        if not 1 <= shortcut < r:
            raise ValueError(
                f"shortcut_recurrences is {shortcut}: it must lie in 1..{r - 1}, fewer than the {r} of the call."
            )

    def _check_adaptive(
        self,
        depth: AdaptiveDepth,
        predict: Predict | None,
        every_state: bool,
        cache: Cache | None,
    ) -> None:
        """Refuse adaptive depth where it would mean nothing or give other numbers in silence."""
        if self.training:
            raise ValueError("adaptive_depth is for inference: call model.eval() first.")
        if depth.criterion == "gate" and not self.config.exit_gate:
            raise ValueError(
                'adaptive_depth has criterion="gate", but the model has no exit gate (exit_gate=True in its config, '
                'trained with it). Use "change" or "kl".'
            )
        if depth.criterion == "kl" and predict is None:
            raise ValueError(
                'adaptive_depth has criterion="kl", which needs an LM head: call LoopedForCausalLM, or give predict.'
            )
        if every_state:
            raise ValueError(
                "output_recurrent_states and adaptive_depth exclude each other: a token that stops has no later states."
            )
        if self.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"adaptive_depth needs the attention 'sdpa' or 'eager', not {self.config._attn_implementation!r}: "
                "its queries are some of the tokens."
            )
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(
                "adaptive_depth does not go with generate_batch's paged cache; use generate."
            )

    def _check_cache(self, cache: Cache, r: int, seen: int | torch.Tensor, new_tokens: int) -> None:
        """Refuse a cache with too few slots, of unequal lengths, or with no room for the new tokens."""
        slots = self.config.cache_slots(r)
        if cache.layer_class_to_replicate is None and len(cache.layers) < slots:
            raise ValueError(
                f"The cache has {len(cache.layers)} slots, but num_recurrences = {r} uses {slots}. Pass "
                "cache=DynamicCache(), which grows, let generate make the cache, or set "
                f"model.config.num_recurrences = {r} before making it."
            )
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError(
                "A cache can't be used while gradient checkpointing runs layers twice. Leave cache out, switch "
                "checkpointing off, or call under torch.no_grad()."
            )
        if torch.compiler.is_compiling():
            return  # the lengths of static caches are tensors, and reading them would break the graph
        first, last = int(seen), int(cache.get_seq_length(slots - 1))
        if first != last:
            raise ValueError(
                f"The cache holds {first} tokens, but only {last} of them for num_recurrences = {r}: earlier calls ran "
                "fewer recurrences. Use one num_recurrences for all calls on a cache, or a new cache."
            )
        room = cache.layers[0].get_max_length() if cache.layers else -1
        if 0 <= room < first + new_tokens:
            raise ValueError(
                f"The cache has room for {room} tokens, but holds {first} and gets {new_tokens} more. Make it with "
                f"max_cache_len >= {first + new_tokens}."
            )


def _is_2d(mask: torch.Tensor | None) -> bool:
    return isinstance(mask, torch.Tensor) and mask.ndim == 2


def _check_shapes(
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    seen: int | None,
) -> None:
    """Refuse a mask that does not cover cached and new tokens, or positions of another number of tokens.

    seen: tokens that a growing cache holds; None for caches of fixed length, whose mask may reach further.
    """
    rows, tokens = inputs_embeds.shape[:2]
    if isinstance(attention_mask, torch.Tensor):
        length = tokens + (seen or 0)
        shape = tuple(attention_mask.shape)
        if attention_mask.ndim == 2:
            fits = shape[0] == rows and (shape[1] >= tokens if seen is None else shape[1] == length)
        else:
            fits = attention_mask.ndim == 4 and shape[0] in (1, rows) and shape[2] == tokens
        if not fits:
            raise ValueError(
                f"attention_mask has the shape {shape}, but there are {rows} rows of {length} tokens, cached ones "
                f"included: give it [{rows}, {length}], or [{rows}, 1, {tokens}, {length}] for a mask of each pair."
            )
    if (
        position_ids.ndim != 2
        or position_ids.shape[1] != tokens
        or len(position_ids) not in (1, rows)
    ):
        raise ValueError(
            f"position_ids has the shape {tuple(position_ids.shape)}, but there are {rows} rows of {tokens} new "
            f"tokens: give it [{rows}, {tokens}] or [1, {tokens}]."
        )


def _check_targets(name: str, targets: torch.Tensor, shape: torch.Size, vocab_size: int) -> None:
    """Refuse targets that are not one for each scored position [B, T], or no token (asked on CPUs, where it's free)."""
    if targets.shape != shape:
        raise ValueError(
            f"{name} has the shape {tuple(targets.shape)}, but {tuple(shape)} positions are scored: give one target "
            "for each of them."
        )
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= vocab_size))]
    if wrong.numel():
        raise ValueError(
            f"{name} holds {wrong[0]}: targets must lie in 0..{vocab_size - 1} (vocab_size − 1), or be −100, which is "
            "not scored."
        )


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    """Looped transformer with LM head and soft-capped float32 logits."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.model = LoopedModel(config)
        self.lm_head = LoopedLMHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        num_recurrences: int | None = None,
        output_recurrent_states: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool | None = None,
        adaptive_depth: AdaptiveDepth | None = None,
        shortcut_recurrences: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LoopedCausalLMOutput:
        """Score tokens; arguments as in `LoopedModel.forward`, and these.

        Parameters
        ----------
        labels
            Tokens [B, T], shifted inside; −100 is not scored. The loss is the mean cross entropy in nats per token.
            `shift_labels` takes targets that are shifted already.
        logits_to_keep
            Score only the last n positions (0: all), or the given ones. Labels are then those of the scored positions.
        skip_logits
            With labels, return the loss alone, computed without holding the logits (`chunked_loss.py`). None: in
            training what the config says, else False.
        shortcut_recurrences
            s: add `shortcut_weight` times the loss after s recurrences, and the mean squared distance per channel of
            what the LM head reads then from what it reads after all r (LoopFormer, arXiv:2602.11451).

        In training, the loss of a model with an exit gate is Σ_t p(t)·L(t) − β·H(p), the mean over tokens of the
        losses after each recurrence, weighted by the exit distribution, less its entropy (Ouro, arXiv:2510.25741,
        eq. 4); in eval mode it is that of the last recurrence.
        """
        exits = self.training and self.config.exit_gate
        exits = exits and (labels is not None or kwargs.get("shift_labels") is not None)
        if exits or shortcut_recurrences is not None:
            self._check_objective(exits, shortcut_recurrences, labels, **kwargs)
        outputs: LoopedModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_recurrences=num_recurrences,
            output_recurrent_states=output_recurrent_states,
            adaptive_depth=adaptive_depth,
            predict=self._log_probabilities if adaptive_depth is not None else None,
            output_exits=exits,
            shortcut_recurrences=shortcut_recurrences,
            **kwargs,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        if skip_logits is None:
            skip_logits = self.training and self.config.skip_logits
        logits = loss = None
        shift_labels = kwargs.get("shift_labels")
        scored = labels is not None or shift_labels is not None
        if scored:
            name = "labels" if shift_labels is None else "shift_labels"
            targets = labels if shift_labels is None else shift_labels
            _check_targets(name, targets, hidden_states.shape[:-1], self.config.vocab_size)
        if exits:
            loss, logits = self._exit_loss(outputs, labels, logits_to_keep, **kwargs)
        elif scored and skip_logits and self._can_skip_logits(**kwargs):
            loss = self._chunked_loss(hidden_states, labels, **kwargs)
        else:
            logits = self._logits(hidden_states)
            if scored:
                loss = self.loss_function(
                    logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
                )
        if shortcut_recurrences is not None:
            short = slice_logits_to_keep(outputs.shortcut_hidden_state, logits_to_keep)
            loss = loss + self.config.shortcut_weight * self._shortcut_loss(
                short, hidden_states, labels, **kwargs
            )
        return LoopedCausalLMOutput(
            loss=loss,
            logits=None if scored and skip_logits else logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            recurrent_states=outputs.recurrent_states,
            recurrences_used=outputs.recurrences_used,
        )

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Soft-capped float32 logits, [B, T, D] → [B, T, V]."""
        logits = self.lm_head(hidden_states).float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _log_probabilities(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._logits(hidden_states).log_softmax(dim=-1)

    def _check_objective(
        self, exits: bool, shortcut: int | None, labels: torch.Tensor | None, **kwargs
    ) -> None:
        """Refuse what would leave a gate or a shortcut without its loss."""
        if exits and self.loss_function is not ForCausalLMLoss:
            raise ValueError(
                "This model has an exit gate, which is trained by the losses of all recurrences; another loss_function "
                "would leave it untrained. Use the model's own loss, or exit_gate=False."
            )
        if shortcut is not None and labels is None and kwargs.get("shift_labels") is None:
            raise ValueError(
                f"shortcut_recurrences is {shortcut}, but there are no labels to train on; leave it out."
            )
        if exits and shortcut is not None:
            raise ValueError(
                "exit_gate and shortcut_recurrences are two objectives for fewer recurrences; use one of them."
            )

    def _exit_loss(
        self,
        outputs: LoopedModelOutput,
        labels: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss over all exits, nats per scored token, and the logits of the last recurrence, [B, T, V]."""
        targets = _targets(labels, shift_labels)
        log_p = slice_logits_to_keep(outputs.exit_log_probabilities, logits_to_keep)
        states = (slice_logits_to_keep(s, logits_to_keep) for s in outputs.exit_hidden_states)
        total, logits = exit_loss(
            map(self._logits, states), log_p, targets, self.config.exit_entropy_weight
        )
        return total / _items(num_items_in_batch, targets, total), logits

    def _shortcut_loss(
        self,
        short: torch.Tensor,
        full: torch.Tensor,
        labels: torch.Tensor | None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Loss after fewer recurrences, and what the LM head reads then against what it reads after all."""
        targets = _targets(labels, shift_labels)
        loss = self._chunked_loss(short, labels, shift_labels, num_items_in_batch)
        distance = squared_distance(short, full, targets)
        return loss + distance / _items(num_items_in_batch, targets, distance)

    def _can_skip_logits(self, ignore_index: int = IGNORED, **kwargs) -> bool:
        """Whether head and loss are those of `_chunked_loss`, without adapter, tensor parallelism or another loss."""
        return (
            isinstance(self.lm_head, LoopedLMHead)
            and self.loss_function is ForCausalLMLoss
            and (getattr(self, "_tp_size", None) or 1) == 1
            and ignore_index == IGNORED
        )

    def _chunked_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """`loss_function` without the logits: summed cross entropy over scored tokens or `num_items_in_batch`."""
        targets = _targets(labels, shift_labels).to(hidden_states.device)
        total = self.lm_head(hidden_states, targets, self.config.final_logit_softcapping)
        return total / _items(num_items_in_batch, targets, total)

    def _get_resized_lm_head(self, *args, **kwargs) -> LoopedLMHead:
        """Keep the LM head's class, which Transformers replaces by nn.Linear."""
        resized = super()._get_resized_lm_head(*args, **kwargs)
        if isinstance(resized, LoopedLMHead):
            return resized
        head = LoopedLMHead(resized.in_features, resized.out_features, bias=False, device="meta")
        head.weight = resized.weight
        head._is_hf_initialized = True  # not to be drawn anew by a later post_init
        return head

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """Give the cache that `generate` makes the slots of this call's r; one given by the user stays as it is."""
        given = model_kwargs.get("cache")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("cache")
        if cache is None or cache is given:
            return
        r = self.model.recurrences(model_kwargs.get("num_recurrences"))
        slots = self.config.cache_slots(r)
        del cache.layers[slots:]
        while len(cache.layers) < slots:
            cache.layers.append(copy.deepcopy(cache.layers[-1]))

    def _get_candidate_generator(self, *args, generation_config, model_kwargs, **kwargs):
        """Let an assistant draft with the recurrences of its own config, or this model with fewer.

        `generate(assistant_early_exit=k)` drafts with k recurrences of the model itself.
        """
        drafting = {key: value for key, value in model_kwargs.items() if key != "num_recurrences"}
        if generation_config.assistant_early_exit is not None:
            drafting["num_recurrences"] = generation_config.assistant_early_exit
            kwargs["assistant_model"] = self
            generation_config = copy.deepcopy(generation_config)
            generation_config.assistant_early_exit = None
        return super()._get_candidate_generator(
            *args, generation_config=generation_config, model_kwargs=drafting, **kwargs
        )

    def generate_batch(self, inputs, *args, num_recurrences: int | None = None, **kwargs):
        """Continuous batching as in Transformers, with the config's r.

        Raises
        ------
        ValueError
            If another num_recurrences is asked for: the paged cache is sized from the config.
        """
        if num_recurrences not in (None, self.config.num_recurrences):
            raise ValueError(
                f"num_recurrences is {num_recurrences}, but generate_batch takes r from the config, "
                f"{self.config.num_recurrences}. Set model.config.num_recurrences = {num_recurrences}, or use generate."
            )
        return super().generate_batch(inputs, *args, **kwargs)


def _targets(labels: torch.Tensor | None, shift_labels: torch.Tensor | None) -> torch.Tensor:
    """Target of each position, [B, T]: those given, or the next label."""
    if shift_labels is not None:
        return shift_labels
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _items(
    num_items_in_batch: torch.Tensor | int | None, targets: torch.Tensor, like: torch.Tensor
) -> torch.Tensor | int:
    """Count what a sum of losses is divided by: the scored tokens, unless the trainer did."""
    if num_items_in_batch is None:
        return (targets != IGNORED).sum()
    if torch.is_tensor(num_items_in_batch):
        return num_items_in_batch.to(like.device)
    return num_items_in_batch


@contextmanager
def _without_gradient(device_type: str):
    """Record nothing for differentiation, and keep casts made here out of autocast's cache.

    Autocast would hand the recorded recurrences the weights cast here, which carry no gradient, in silence.
    """
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    with (
        torch.no_grad(),
        torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False),
    ):
        yield


def _optional_norm(config: LoopedConfig, present: bool) -> nn.Module:
    return LoopedRMSNorm(config.hidden_size, config.rms_norm_eps) if present else nn.Identity()


def _layers(
    config: LoopedConfig, count: int, first_slot: int, matrix: MatrixFactory
) -> nn.ModuleList:
    return nn.ModuleList(
        LoopedDecoderLayer(config, first_slot + index, matrix) for index in range(count)
    )


__all__ = ["LoopedForCausalLM", "LoopedModel", "LoopedPreTrainedModel"]
