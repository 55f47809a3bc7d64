# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Parameters, FLOPs and bytes of a looped model, from its config alone, as plain integers.

Symbols: d hidden size, T sequence length (tokens), r recurrences, V vocabulary, K lanes. A multiply-add is 2 FLOPs;
a backward pass costs twice its forward. FLOPs follow the reference implementation of Schwethelm et al. 2026
(arXiv:2604.21106, eq. 1 and section 5.1): every weight of an executed layer, its norms' gains included, counts
2 per token forward; attention 4·T per head channel without using causality; the LM head 2·d·V. The embedding's look-up,
the softmax, the model-level norms and the factor on residual branches count nothing. Low-rank adapters, the gains of
time conditioning and the exit gate (in training) count 2 for each of their weights that a token meets. With it,
steps = round(C / (FLOPs per token · batch)) gives all 116 token counts of the paper's grid.
"""

from dataclasses import dataclass

from .configuration_looped import TIME_FEATURES, LoopedConfig


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Weights of a model by how often a token meets them (counts); their sum is the module's.

    once: matrices outside the loop (prelude, coda) and tables with an entry per recurrence; rec: matrices shared by the
    recurrences; injection: the part of `rec` that injects; norm: RMSNorm gains; embedding: embedding and LM head (one
    matrix when tied).
    """

    once: int
    rec: int
    injection: int
    norm: int
    embedding: int

    @property
    def total(self) -> int:
        """All parameters of the module."""
        return self.once + self.rec + self.norm + self.embedding


def parameters(config: LoopedConfig) -> ParameterCount:
    """Count parameters (paper, section 3.2: N_once, N_rec).

    Hyperconnection scalars and adapters are tables with one entry per recurrence and count as `once`; what all
    recurrences share (diagonal injection, time modulation, exit gate) as `rec`.

    >>> count = parameters(LoopedConfig.iso_depth(640, 4, vocab_size=32064))
    >>> count.once + count.rec
    40140800
    """
    d = config.hidden_size
    outer = config.num_prelude_layers + config.num_coda_layers
    embeddings = 1 if config.tie_word_embeddings else 2
    shared = config.num_recurrent_layers * (_block_matrices(config) + _modulation(config))
    tables = config.num_recurrent_layers * _adapter_weights(config) + _injection_scalars(config)
    return ParameterCount(
        once=outer * _block_matrices(config) + config.num_trained_recurrences * tables,
        rec=shared + _injection_weights(config) + (d + 1) * config.exit_gate,
        injection=_injection_weights(config),
        norm=d * (2 * config.num_unique_layers + _model_norms(config)),
        embedding=embeddings * config.vocab_size * d,
    )


def forward_flops_per_token(
    config: LoopedConfig, sequence_length: int, recurrences: float | None = None
) -> int:
    """Forward FLOPs per token at a sequence length in tokens (eq. 1 with attention and LM head).

    recurrences: r of the call, or the mean over tokens where depth is adaptive; None: the config's.
    """
    r = config.num_recurrences if recurrences is None else recurrences
    outer = _prelude_flops(config, sequence_length) + _output_flops(config, sequence_length)
    return round(outer + r * _recurrence_flops(config, sequence_length))


def train_flops_per_token(
    config: LoopedConfig,
    sequence_length: int,
    recurrences: int | None = None,
    shortcut_recurrences: int = 0,
) -> int:
    """Training FLOPs per token: forward, and twice that backward for what is differentiated (section 5.1).

    With truncated BPTT the first r − num_backprop_recurrences recurrences cost their forward pass only; with an exit
    gate, coda and LM head run after every recurrence; a shortcut's recurrences come with a coda and a head too.
    recurrences: r of the step; None: the config's.

    >>> train_flops_per_token(LoopedConfig.iso_depth(640, 1, vocab_size=32064), 2048)
    1027676160
    """
    r = config.num_recurrences if recurrences is None else recurrences
    detached = max(0, r - config.backprop_recurrences) if config.truncated else 0
    exits = 1 + (shortcut_recurrences > 0)
    gate = 0
    if config.exit_gate:
        exits, gate = r, 2 * r * config.hidden_size
    recurrence = _recurrence_flops(config, sequence_length)
    forward = _prelude_flops(config, sequence_length) + (r + shortcut_recurrences) * recurrence
    forward += exits * _output_flops(config, sequence_length) + gate
    return 3 * forward - 2 * detached * recurrence


def executed_parameters(config: LoopedConfig) -> int:
    """Non-embedding parameters a token meets, repetitions counted: half the forward FLOPs without attention and head.

    HyperP's reference horizon is ten tokens for each of them.
    """
    head = 2 * config.hidden_size * config.vocab_size
    return (forward_flops_per_token(config, 0) - head) // 2


def weight_bytes(config: LoopedConfig, bytes_per_weight: int = 2) -> int:
    """Bytes of all weights (bfloat16 by default)."""
    return parameters(config).total * bytes_per_weight


def kv_bytes_per_token(config: LoopedConfig, bytes_per_value: int = 2) -> int:
    """Bytes of keys and values that a cached token takes (bfloat16 by default).

    One slot for each layer outside the loop, and for each recurrent layer one for every cached recurrence.
    """
    slots = config.cache_slots(config.num_recurrences)
    return slots * 2 * config.num_key_value_heads * config.head_dim * bytes_per_value


def _block_matrices(config: LoopedConfig) -> int:
    """Matrix parameters of one block, n_b; 12·d² in the paper's shape."""
    d = config.hidden_size
    attention = 2 * d * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    return attention + (3 if config.gated_mlp else 2) * d * config.intermediate_size


def _model_norms(config: LoopedConfig) -> int:
    """RMSNorms outside the blocks: the last one and, where they are there, the embedding's and the state's."""
    return 1 + config.embedding_norm + config.recurrent_norm


def _layer_flops(config: LoopedConfig, sequence_length: int) -> int:
    """Forward FLOPs per token of one executed block, gains and attention included."""
    attention = 4 * config.num_attention_heads * config.head_dim * sequence_length
    return 2 * (_block_matrices(config) + 2 * config.hidden_size) + attention


def _recurrence_flops(config: LoopedConfig, sequence_length: int) -> int:
    """Forward FLOPs per token of one recurrence."""
    gains = 4 * config.hidden_size if config.time_conditioning else 0
    layer = _layer_flops(config, sequence_length) + 2 * (_adapter_weights(config) + gains)
    return config.num_recurrent_layers * layer + _injection_flops(config)


def _prelude_flops(config: LoopedConfig, sequence_length: int) -> int:
    """Forward FLOPs per token of the prelude."""
    return config.num_prelude_layers * _layer_flops(config, sequence_length)


def _output_flops(config: LoopedConfig, sequence_length: int) -> int:
    """Forward FLOPs per token of coda and LM head."""
    head = 2 * config.hidden_size * config.vocab_size
    return config.num_coda_layers * _layer_flops(config, sequence_length) + head


def _adapter_weights(config: LoopedConfig) -> int:
    """Parameters of one recurrence's adapters of one layer: rank · (inputs + outputs) of each matrix."""
    if config.adapter_rank is None:
        return 0
    d = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = 2 * (d + queries) + 2 * (d + keys)
    mlp = (3 if config.gated_mlp else 2) * (d + config.intermediate_size)
    return config.adapter_rank * (attention + mlp)


def _modulation(config: LoopedConfig) -> int:
    """Parameters of one layer's time modulation: eight features, four gains a channel."""
    return TIME_FEATURES * 4 * config.hidden_size if config.time_conditioning else 0


def _injection_weights(config: LoopedConfig) -> int:
    """Parameters of the linear injection, n_i = 2·d², or of the diagonal one, 3·d."""
    d = config.hidden_size
    return {"linear": 2 * d**2, "diagonal": 3 * d}.get(config.injection, 0)


def _injection_scalars(config: LoopedConfig) -> int:
    """Hyperconnection scalars α, M, β of one recurrence, K² + 2K."""
    return (
        config.num_lanes**2 + 2 * config.num_lanes if config.injection == "hyperconnections" else 0
    )


def _injection_flops(config: LoopedConfig) -> int:
    """Forward FLOPs per token of one recurrence's injection."""
    d = config.hidden_size
    if config.injection == "diagonal":
        return 4 * d  # a ⊙ h + b ⊙ e; a is a function of weights alone
    return 2 * (_injection_scalars(config) * d or _injection_weights(config))
