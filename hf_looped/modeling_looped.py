# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Looped (depth-recurrent) transformer: prelude, a shared block run r times, coda.

Equations are those of Schwethelm et al. 2026 (arXiv:2604.21106); README.md in this folder lists them.

Shapes: B rows, T new tokens, S cached + new tokens, D hidden size, H heads, G key/value heads, C head size,
V vocabulary, K lanes. Slots of the cache, one per layer call: prelude, coda, recurrence 0, recurrence 1, …, so that a
larger r only appends slots.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
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
    merge_with_config_defaults,
)
from transformers.utils.output_capturing import capture_outputs

from .configuration_looped import LoopedConfig


class LoopedRMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight, over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(
            x.dtype
        )


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

    @dynamic_rope_update
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos, sin [B, T, C] in the dtype of x for positions [B, T]."""
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = position_ids[..., None].float() * self.inv_freq.float().to(
                x.device
            )  # [B, T, C/2]
            angles = torch.cat((angles, angles), dim=-1)
            cos = angles.cos() * self.attention_scaling
            sin = angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + C/2) of x [B, H, T, C] by the angles of cos, sin [B, 1, T, C], in Llama's direction."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


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

    The softmax sums in float32 whatever the dtype of its input. On CPUs this beats the fused kernel in bfloat16
    for short sequences (tests/benchmarks/attention.py).
    """
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query * scaling, key.transpose(2, 3))  # [B, H, T, S]
    if attention_mask is not None:
        scores = scores + attention_mask.to(scores.dtype)
    weights = nn.functional.softmax(scores, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class LoopedAttention(nn.Module):
    """Causal grouped-query attention with rotary embedding and QK-norm without gain (Table 4)."""

    def __init__(self, config: LoopedConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        width, kv_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        slot_offset: int = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend. hidden_states [B, T, D] → [B, T, D], weights [B, H, T, S] where the implementation has them."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)  # [B, H, T, C]
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)  # [B, G, T, C]
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        cos, sin = (part.to(query.dtype).unsqueeze(1) for part in position_embeddings)
        query = self._normalise(rotate(query, cos, sin))
        key = self._normalise(rotate(key, cos, sin))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx + slot_offset, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.o_proj(output), weights

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self.config.rms_norm_eps).to(
            x.dtype
        )


class LoopedMLP(nn.Module):
    """Down(act(Up(x))), squared ReLU in the paper."""

    def __init__(self, config: LoopedConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class LoopedDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block: x + Attn(RMSNorm(x)), then x + MLP(RMSNorm(x))."""

    def __init__(self, config: LoopedConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LoopedAttention(config, layer_idx)
        self.mlp = LoopedMLP(config)
        self.input_layernorm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Apply the block, [B, T, D] → [B, T, D]."""
        attention, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **kwargs)
        hidden_states = hidden_states + attention
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


# Injections share one interface: `start` makes what recurrences carry from the initial state, `read` gives the block's
# input at recurrence t, `write` takes the block's normed output back, `finish` gives the coda's input.


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


class InjectionProjection(nn.Linear):
    """W of the linear injection, a class of its own for its initialisation [I ‖ 0]."""


class LinearInjection(PassthroughInjection):
    """u(t) = W·[e ‖ h(t)], W [D, 2·D], initially [I ‖ 0] (eq. 5)."""

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.proj = InjectionProjection(2 * config.hidden_size, config.hidden_size, bias=False)

    def read(self, carried: torch.Tensor, e: torch.Tensor, t: int) -> torch.Tensor:
        return self.proj(torch.cat((e, carried), dim=-1))


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
    "hyperconnections": HyperconnectionsInjection,
}


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
    """LM head, a class of its own for its initialisation N(0, 0.001²)."""


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
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=scale)
        elif isinstance(module, nn.Linear):
            bound = scale * (3.0 / module.in_features) ** 0.5
            init.uniform_(module.weight, -bound, bound)
        else:
            super()._init_weights(module)


class LoopedModel(LoopedPreTrainedModel):
    """Looped transformer without LM head: tokens [B, T] → hidden states [B, T, D]."""

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_norm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
        first_coda, first_recurrent = (
            config.num_prelude_layers,
            config.num_prelude_layers + config.num_coda_layers,
        )
        self.prelude = _layers(config, config.num_prelude_layers, first_slot=0)
        self.recurrent = _layers(config, config.num_recurrent_layers, first_slot=first_recurrent)
        self.coda = _layers(config, config.num_coda_layers, first_slot=first_coda)
        self.injection = INJECTIONS[config.injection](config)
        self.recurrent_norm = LoopedRMSNorm(config.hidden_size, config.rms_norm_eps)
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Run prelude, r recurrences and coda.

        Parameters
        ----------
        input_ids, inputs_embeds
            Tokens [B, T] or embeddings [B, T, D], exactly one of them.
        attention_mask, position_ids, cache, use_cache
            As in every Transformers decoder; rows with several documents are separated by `position_ids` that start
            again at 0, if neither mask nor cache is given.
        num_recurrences
            r of this call; None: the config's.

        Raises
        ------
        ValueError
            If both or neither of `input_ids` and `inputs_embeds` are given, or r is out of range.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Exactly one of input_ids and inputs_embeds must be given.")
        r = self._recurrences(num_recurrences)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache()  # grows by a slot at each layer's first call, whatever r
        self._check_slots(cache, r)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (
                torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
            ).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        kwargs |= {
            "attention_mask": mask,
            "position_ids": position_ids,
            "position_embeddings": self.rotary_emb(inputs_embeds, position_ids),
        }
        hidden_states = self.embed_norm(inputs_embeds)
        for layer in self.prelude:
            hidden_states = layer(hidden_states, cache=cache, **kwargs)
        hidden_states = self._recur(hidden_states, r, cache, **kwargs)
        for layer in self.coda:
            hidden_states = layer(hidden_states, cache=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _recur(self, e: torch.Tensor, r: int, cache: Cache | None, **kwargs) -> torch.Tensor:
        """Run the shared block r times from the prelude's output e, [B, T, D] → [B, T, D].

        Recurrences before the last `backprop_recurrences` are not recorded for differentiation (truncated BPTT).
        """
        truncated = (
            r - self.config.backprop_recurrences if self.training and self.config.truncated else 0
        )
        carried = self.injection.start(self._initial_state(e, kwargs["position_ids"]))
        for t in range(r):
            with _without_gradient(e.device.type) if t < truncated else nullcontext():
                hidden_states = self.injection.read(carried, e, t)
                for layer in self.recurrent:
                    hidden_states = layer(
                        hidden_states, cache=cache, slot_offset=t * len(self.recurrent), **kwargs
                    )
                carried = self.injection.write(carried, self.recurrent_norm(hidden_states), t)
        return self.injection.finish(carried)

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

    def _recurrences(self, asked: int | None) -> int:
        r = self.config.num_recurrences if asked is None else asked
        if r < 1:
            raise ValueError(f"num_recurrences is {r}: at least one recurrence is needed.")
        if self.config.injection == "hyperconnections" and r > self.config.num_trained_recurrences:
            raise ValueError(
                f"num_recurrences is {r}, but this model has hyperconnections for "
                f"{self.config.num_trained_recurrences} recurrences (num_trained_recurrences). Ask for at most that "
                "many."
            )
        return r

    def _check_slots(self, cache: Cache | None, r: int) -> None:
        """Refuse a cache of fixed length that has no slot for the last recurrences."""
        if cache is None or cache.layer_class_to_replicate is not None:
            return
        slots = len(self.prelude) + len(self.coda) + r * len(self.recurrent)
        if len(cache.layers) < slots:
            raise ValueError(
                f"The cache has {len(cache.layers)} slots, but num_recurrences = {r} calls {slots} layers. Pass "
                f"cache=DynamicCache(), which grows, or set model.config.num_recurrences = {r} before making the cache."
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
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Score tokens; arguments as in `LoopedModel.forward`, and these.

        Parameters
        ----------
        labels
            Tokens [B, T], shifted inside; −100 is not scored. The loss is the mean cross entropy in nats per token.
            `shift_labels` takes targets that are shifted already.
        logits_to_keep
            Score only the last n positions (0: all), or the given ones.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_recurrences=num_recurrences,
            **kwargs,
        )
        logits = self.lm_head(
            slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        ).float()  # [B, T, V]
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


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


def _layers(config: LoopedConfig, count: int, first_slot: int) -> nn.ModuleList:
    return nn.ModuleList(LoopedDecoderLayer(config, first_slot + index) for index in range(count))


__all__ = ["LoopedForCausalLM", "LoopedModel", "LoopedPreTrainedModel"]
