# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Configuration of a looped language model: prelude, a shared block run r times, coda.

Sources: Schwethelm et al. 2026 (arXiv:2604.21106), section 3.1, Table 4 and appendix C, unless a field says otherwise.
"""

import math
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

Injection = Literal["linear", "additive", "passthrough", "diagonal", "hyperconnections"]
StateInit = Literal["auto", "prelude", "zeros", "normal"]

CONFIG_VERSION = 3  # 2: gated MLP, optional norms, residual multiplier; 3: diagonal injection, adapters, time, exits

TIME_FEATURES = 8  # functions of time and step size that condition a layer

# What an unlooped model has of the loop: nothing.
UNLOOPED = {
    "injection": "passthrough",
    "adapter_rank": None,
    "time_conditioning": False,
    "exit_gate": False,
}


@strict
class LoopedConfig(PreTrainedConfig):
    """Architecture of a looped language model.

    Parameters
    ----------
    vocab_size
        Entries of embedding and LM head (the padded vocabulary).
    hidden_size
        Width d.
    intermediate_size
        Width of the MLP; None: 4·d.
    num_attention_heads, num_key_value_heads, head_dim
        Attention heads, key/value heads (None: as many as heads) and head size (None: d / heads).
    num_prelude_layers, num_recurrent_layers, num_coda_layers
        Layers of each section; the recurrent ones are shared by the recurrences.
    num_recurrences
        r, how often the recurrent section runs.
    num_trained_recurrences
        Length of tables with one entry per recurrence (hyperconnections). Set once, from num_recurrences; a
        checkpoint keeps it when num_recurrences is changed later.
    num_backprop_recurrences
        Recurrences, counted from the last, that are differentiated in training (truncated BPTT, section 5.1).
        None: all.
    injection
        How the prelude's output e enters recurrence t: `linear` W·[e ‖ h] (eq. 5), `additive` h + e, `passthrough`
        h (e is the initial state only), `diagonal` a ⊙ h + b ⊙ e with 0 < a < 1 (Parcae, Prairie et al. 2026,
        arXiv:2604.12946), `hyperconnections` (section 5.2).
    num_cached_recurrences
        m, recurrences whose keys and values are cached while generating: the last m; earlier ones read the past of
        the slot they share (recurrence t uses slot t mod m) and their own tokens. None: all of them.
    num_lanes
        K, residual lanes of the hyperconnections.
    adapter_rank
        Rank of low-rank adapters that each recurrence adds to the shared matrices (relaxed recursive transformers, Bae
        et al. 2024, arXiv:2410.20672). None: no adapters.
    time_conditioning
        Scale each shared layer's inputs and outputs by functions of time t/r and step size 1/r, so that fewer
        recurrences take larger steps (LoopFormer, Jeddi et al. 2026, arXiv:2602.11451).
    shortcut_weight
        Weight of the shorter trajectory's losses where `forward` is given `shortcut_recurrences`.
    exit_gate
        A learned probability of stopping after each recurrence, trained by the losses of all recurrences, weighted by
        the distribution of exits (Ouro, Zhu et al. 2025, arXiv:2510.25741).
    exit_entropy_weight
        β of the entropy of that distribution, which is subtracted from the loss, nats.
    state_init
        Initial state h(0): the prelude's output, zeros, or N(0, 1) noise. `auto`: zeros for `additive`, else prelude.
        In eval mode the noise is a fixed function of state_seed and position, so that decoding does not depend on
        caching; in training it is drawn anew.
    state_seed
        Seed of that function.
    hidden_act
        Activation of the MLP (the paper: squared ReLU).
    gated_mlp
        Down(act(Gate(x)) · Up(x)) instead of Down(act(Up(x))) (the paper: no; Llama: yes, with `silu`).
    qk_norm
        Normalise rotated queries and keys, without gain (the paper: yes; Llama: no).
    embedding_norm
        RMSNorm after the embedding (the paper: yes; Llama: no).
    recurrent_norm
        RMSNorm of the state after each recurrence (the paper: yes). Without it the coda reads the block's residual
        stream as it is, as layers of an unlooped model do (McLeish et al. 2025, arXiv:2511.07384).
    residual_multiplier
        Factor on the output of every attention and MLP before it is added to the residual stream (the paper: 1;
        HyperP, arXiv:2603.28743, section 3.3: 1/√(2·executed layers)).
    rms_norm_eps
        ε of every RMSNorm, of queries and keys too.
    rope_parameters
        Rotary embedding as in Transformers; None: default type, θ = 10,000.
    max_position_embeddings
        Longest sequence seen in training, tokens.
    final_logit_softcapping
        c of c·tanh(logits / c), in float32. None: no cap.
    initializer_range
        Factor on the standard deviation of every random initial weight; 1 is the paper's initialisation.
    attention_dropout
        Dropout on attention weights (the paper: none).
    tie_word_embeddings
        Share embedding and LM head (the paper: no).
    skip_logits
        In training with labels, return the loss without the logits, computed in chunks of tokens that never hold
        [B, T, V] (`chunked_loss.py`). The argument of `forward` overrules it.
    use_cache, bos_token_id, eos_token_id, pad_token_id
        As in every Transformers config.
    config_version
        Format of the config, for an error instead of a wrong model where an older hf-looped reads a newer checkpoint.

    Raises
    ------
    huggingface_hub.errors.StrictDataclassError
        For a value of the wrong type, or a combination that has no meaning or silently trains nothing; the message
        names the field.

    Examples
    --------
    >>> config = LoopedConfig.iso_depth(hidden_size=640, recurrences=4, vocab_size=32064)
    >>> config.num_prelude_layers, config.num_recurrent_layers, config.num_coda_layers, config.num_hidden_layers
    (2, 4, 2, 20)
    """

    model_type = "looped"
    keys_to_ignore_at_inference = ["cache"]
    base_model_fsdp_plan = {
        "embed_tokens": "free_full_weight",
        "prelude.*": "free_full_weight",
        "recurrent.*": "free_full_weight",
        "coda.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 32064
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_prelude_layers: int = 2
    num_recurrent_layers: int = 4
    num_coda_layers: int = 2
    num_recurrences: int = 4
    num_trained_recurrences: int | None = None
    num_backprop_recurrences: int | None = None
    num_cached_recurrences: int | None = None
    injection: Injection = "linear"
    num_lanes: int = 2
    adapter_rank: int | None = None
    time_conditioning: bool = False
    shortcut_weight: float | int = 0.1
    exit_gate: bool = False
    exit_entropy_weight: float | int = 0.1
    state_init: StateInit = "auto"
    state_seed: int = 0
    hidden_act: str = "relu2"
    gated_mlp: bool = False
    qk_norm: bool = True
    embedding_norm: bool = True
    recurrent_norm: bool = True
    residual_multiplier: float | int = 1.0
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters | dict | None = None
    max_position_embeddings: int = 2048
    final_logit_softcapping: float | None = 15.0
    initializer_range: float = 1.0
    attention_dropout: float | int = 0.0
    tie_word_embeddings: bool = False
    skip_logits: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    config_version: int = CONFIG_VERSION

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size is {self.hidden_size} and num_attention_heads {self.num_attention_heads}: without "
                    "head_dim the width must be divisible by the heads. Change one of them or give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_trained_recurrences is None:
            self.num_trained_recurrences = self.num_recurrences
        executed = kwargs.pop("num_hidden_layers", None)
        super().__post_init__(**kwargs)
        if executed is not None and executed != self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_layers is {executed}, but it is derived: prelude + recurrences · recurrent + coda = "
                f"{self.num_hidden_layers}. Leave it out and set the sections' layers and num_recurrences."
            )

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """Make a config from a checkpoint's fields and replacements, e.g. `from_pretrained(..., num_recurrences=8)`.

        Replaced fields are there when derived values and rules are worked out, so that nothing goes stale. If r falls
        below `num_backprop_recurrences`, all recurrences are differentiated.
        """
        replaced = {name: kwargs.pop(name) for name in list(kwargs) if name in cls.__annotations__}
        fields = {**config_dict, **replaced}
        if cls._auto_class is None:
            # Not an export's own class: what is saved next has no code beside it to name.
            fields.pop("auto_map", None)
        k = fields.get("num_backprop_recurrences")
        given = "num_backprop_recurrences" in replaced
        if not given and k is not None and k > fields.get("num_recurrences", k):
            fields["num_backprop_recurrences"] = None
        return super().from_dict(fields, **kwargs)

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]
        """How tensor parallelism splits each matrix: rules of Transformers, for the matrices that there are.

        Adapted matrices stay whole: there is no rule for them.
        """
        columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"]
        if self.gated_mlp:
            columns.append("mlp.gate_proj")
        styles = dict.fromkeys(columns, "colwise") | dict.fromkeys(
            ("self_attn.o_proj", "mlp.down_proj"), "rowwise"
        )
        sections = ("prelude", "coda") if self.adapter_rank else ("prelude", "recurrent", "coda")
        return {
            f"{section}.*.{projection}": style
            for section in sections
            for projection, style in styles.items()
        }

    @property
    def num_hidden_layers(self) -> int:
        """Executed layers, so that stock caches hold one slot for each layer call."""
        return (
            self.num_prelude_layers
            + self.num_recurrences * self.num_recurrent_layers
            + self.num_coda_layers
        )

    @property
    def num_unique_layers(self) -> int:
        """Layers with weights of their own."""
        return self.num_prelude_layers + self.num_recurrent_layers + self.num_coda_layers

    @property
    def initial_state(self) -> str:
        """`state_init` with `auto` resolved."""
        if self.state_init == "auto":
            return "zeros" if self.injection == "additive" else "prelude"
        return self.state_init

    @property
    def backprop_recurrences(self) -> int:
        """`num_backprop_recurrences` with None resolved to all of them."""
        return (
            self.num_recurrences
            if self.num_backprop_recurrences is None
            else self.num_backprop_recurrences
        )

    def cached_recurrences(self, num_recurrences: int) -> int:
        """Recurrences with a cache slot of their own when r = `num_recurrences`: min(m, r)."""
        if self.num_cached_recurrences is None:
            return num_recurrences
        return min(self.num_cached_recurrences, num_recurrences)

    def cache_slots(self, num_recurrences: int) -> int:
        """Cache slots that a call with r = `num_recurrences` uses: one for each layer call whose keys are kept."""
        cached = self.cached_recurrences(num_recurrences)
        outer = self.num_prelude_layers + self.num_coda_layers
        return outer + cached * self.num_recurrent_layers

    @property
    def has_recurrence_tables(self) -> bool:
        """Whether there are weights of each recurrence's own, so that r is at most `num_trained_recurrences`."""
        return self.injection == "hyperconnections" or self.adapter_rank is not None

    @property
    def truncated(self) -> bool:
        """Whether training differentiates fewer recurrences than it runs (truncated BPTT)."""
        return self.backprop_recurrences < self.num_recurrences

    @classmethod
    def iso_depth(
        cls,
        hidden_size: int,
        recurrences: int,
        effective_depth: int = 20,
        shared_depth: int = 16,
        head_dim: int = 128,
        **fields,
    ) -> "LoopedConfig":
        """Model of the paper's iso-depth family: equal executed depth for every r (section 3.1, Table 4).

        Parameters
        ----------
        hidden_size
            Width d, a multiple of `head_dim`.
        recurrences
            r, a divisor of `shared_depth`. r = 1 gives the unlooped baseline: `effective_depth` unshared layers in
            the recurrent section, run once, without injection (0 + 20 + 0).
        effective_depth
            Executed layers.
        shared_depth
            Executed layers of the shared section, r · num_recurrent_layers; prelude and coda halve the rest.
        head_dim
            Head size.
        **fields
            Any other field of the config; those of the loop (`UNLOOPED`) are ignored for r = 1, which has none.

        Raises
        ------
        ValueError
            If a division above leaves a remainder.

        Examples
        --------
        >>> LoopedConfig.iso_depth(640, 1).num_recurrent_layers
        20
        """
        _require(recurrences >= 1, "recurrences", recurrences, "at least one recurrence is needed")
        _require(head_dim >= 1, "head_dim", head_dim, "must be at least 1")
        below = hidden_size // head_dim * head_dim
        nearest = f"{below} and {below + head_dim}" if below > 0 else str(head_dim)
        _require(
            hidden_size > 0 and hidden_size == below,
            "hidden_size",
            hidden_size,
            f"must be a multiple of head_dim = {head_dim}; nearest multiple: {nearest}",
        )
        _require(
            0 < shared_depth <= effective_depth and (effective_depth - shared_depth) % 2 == 0,
            "shared_depth",
            shared_depth,
            f"must lie in 1..effective_depth = {effective_depth} and leave an even rest for prelude and coda",
        )
        _require(
            shared_depth % recurrences == 0,
            "recurrences",
            recurrences,
            f"must divide shared_depth = {shared_depth}",
        )
        outer = (effective_depth - shared_depth) // 2
        unlooped = recurrences == 1
        if unlooped:
            fields |= UNLOOPED
        return cls(
            hidden_size=hidden_size,
            num_attention_heads=hidden_size // head_dim,
            head_dim=head_dim,
            num_prelude_layers=0 if unlooped else outer,
            num_recurrent_layers=effective_depth if unlooped else shared_depth // recurrences,
            num_coda_layers=0 if unlooped else outer,
            num_recurrences=recurrences,
            **fields,
        )

    def validate_architecture(self):
        """Part of the strict validation: refuse what has no meaning or would train nothing in silence."""
        _require(
            self.config_version <= CONFIG_VERSION,
            "config_version",
            self.config_version,
            f"this hf-looped reads configs up to version {CONFIG_VERSION}; upgrade it to load a newer checkpoint",
        )
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "head_dim",
            "vocab_size",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        _require(
            self.num_recurrences >= 1, "num_recurrences", self.num_recurrences, "must be at least 1"
        )
        _require(
            self.num_recurrent_layers >= 1,
            "num_recurrent_layers",
            self.num_recurrent_layers,
            "must be at least 1",
        )
        for name in ("num_prelude_layers", "num_coda_layers"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        _require(
            self.head_dim % 2 == 0,
            "head_dim",
            self.head_dim,
            "must be even: rotary embeddings turn pairs of channels",
        )
        _require(
            self.num_key_value_heads >= 1
            and self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"must divide num_attention_heads = {self.num_attention_heads}",
        )
        _require(
            0 < self.residual_multiplier < math.inf,
            "residual_multiplier",
            self.residual_multiplier,
            "must be positive and finite",
        )
        _require(
            0 <= self.state_seed < 2**31, "state_seed", self.state_seed, "must lie in 0..2^31 - 1"
        )
        self._validate_loop()

    def _validate_loop(self):
        """Rules that tie injection, initial state and truncation together."""
        k, r = self.num_backprop_recurrences, self.num_recurrences
        _require(
            k is None or 1 <= k <= r,
            "num_backprop_recurrences",
            k,
            f"must lie in 1..num_recurrences = {r}, or be None for all",
        )
        m = self.num_cached_recurrences
        _require(
            m is None or m >= 1,
            "num_cached_recurrences",
            m,
            "must be at least 1, or None for all",
        )
        if self.injection == "hyperconnections":
            _require(
                self.num_lanes >= 2,
                "num_lanes",
                self.num_lanes,
                "hyperconnections need at least two lanes (K >= 2)",
            )
        _require(
            self.adapter_rank is None or self.adapter_rank >= 1,
            "adapter_rank",
            self.adapter_rank,
            "must be at least 1, or None for no adapters",
        )
        for name in ("shortcut_weight", "exit_entropy_weight"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, value, "must be finite and not negative")
        self._validate_tables()
        if self.exit_gate:
            _require(
                self.exit_entropy_weight > 0,
                "exit_entropy_weight",
                self.exit_entropy_weight,
                "an exit gate needs the entropy in its loss, or it soon stops everywhere after the same recurrence; "
                "0.1 is a start",
            )
            _require(
                not self.truncated,
                "num_backprop_recurrences",
                k,
                "an exit gate is trained by the losses of all recurrences, but detached ones get no gradient: None",
            )
        if self.injection == "passthrough":
            _require(
                not self.truncated,
                "num_backprop_recurrences",
                k,
                "with passthrough injection the prelude reaches the loss only through the detached recurrences and "
                "would get no gradient; use None, or injection='linear'",
            )
        if self.injection in ("passthrough", "hyperconnections"):
            _require(
                self.state_init in ("auto", "prelude"),
                "state_init",
                self.state_init,
                f"with injection={self.injection!r} the prelude's output enters as the initial state only; use "
                "'prelude'",
            )

    def _validate_tables(self):
        """Rules of weights that each recurrence has of its own."""
        if not self.has_recurrence_tables:
            return
        kind = "hyperconnections" if self.injection == "hyperconnections" else "adapters"
        _require(
            not self.truncated,
            "num_backprop_recurrences",
            self.num_backprop_recurrences,
            f"{kind} have weights for each recurrence, and those of the detached ones would never train; use None, or "
            "a model without them",
        )
        _require(
            self.num_recurrences <= self.num_trained_recurrences,
            "num_recurrences",
            self.num_recurrences,
            f"this model has {kind} for num_trained_recurrences = {self.num_trained_recurrences} only",
        )


def _require(holds: bool, field: str, value, rule: str):
    if not holds:
        raise ValueError(f"{field} is {value}: {rule}.")


__all__ = ["LoopedConfig"]
