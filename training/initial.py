"""Where a run starts: a fresh model of the recipe's architecture, or a checkpoint to train on (`init_from`)."""

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from hf_looped import LoopedConfig, LoopedForCausalLM

# Fields of the recipe's model that the checkpoint decides and has under the same names.
FIXED = (
    "hidden_size",
    "head_dim",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "injection",
    "num_lanes",
    "state_init",
    "tie_word_embeddings",
    "adapter_rank",
    "time_conditioning",
    "shortcut_weight",
    "exit_gate",
    "exit_entropy_weight",
)
# Fields that a run of the checkpoint may choose.
FREE = ("recurrences", "backprop_recurrences", "sample_recurrences", "sampling_sigma")


def initial_model(
    architecture: LoopedConfig, init_from: str | None, attention: str
) -> LoopedForCausalLM:
    """Build the model that training starts from, in float32."""
    if init_from is None:
        model = AutoModelForCausalLM.from_config(architecture, attn_implementation=attention)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            init_from, config=architecture, dtype=torch.float32, attn_implementation=attention
        )
    assert isinstance(model, LoopedForCausalLM)
    return model


def read_architecture(init_from: str) -> LoopedConfig:
    """Read the architecture of a checkpoint folder (or Hub name).

    Raises
    ------
    ValueError
        If there is none, or it is no looped model.
    """
    try:
        config = AutoConfig.from_pretrained(init_from)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"init_from: {init_from!r} cannot be loaded ({reason}). Give a folder made by save_pretrained."
        ) from error
    if not isinstance(config, LoopedConfig):
        raise ValueError(
            f"init_from: {init_from!r} is a {config.model_type} model, not a looped one. A Llama-family checkpoint is "
            "turned into a looped one by python -m training.retrofit."
        )
    return config


def model_fields(init_from: str, given: dict[str, Any]) -> dict[str, Any]:
    """Fields of the recipe's `model` for a checkpoint; `given` may change the recurrences and which are differentiated.

    Raises
    ------
    ValueError
        If `given` says otherwise than the checkpoint, or the checkpoint can't be read.
    """
    config = read_architecture(init_from)
    r, k = config.num_recurrences, config.num_backprop_recurrences
    free: dict[str, Any] = {
        "recurrences": r,
        "backprop_recurrences": "all" if k is None else str(k),
    } | {name: given[name] for name in FREE if name in given}
    shared = int(free["recurrences"]) * config.num_recurrent_layers
    fixed = {name: getattr(config, name) for name in FIXED} | {
        "shared_depth": shared,
        "effective_depth": config.num_prelude_layers + shared + config.num_coda_layers,
        "rope_theta": (config.rope_parameters or {})["rope_theta"],
        "scale_residual": False,  # the checkpoint has its own multiplier
    }
    for name, value in fixed.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"model.{name} is {given[name]!r}, but {init_from} has {value!r}: with init_from the architecture is "
                "the checkpoint's. Leave the field out."
            )
    return fixed | free


def architecture_to_train(
    init_from: str, recurrences: int, backprop_recurrences: int | None, sequence_length: int
) -> LoopedConfig:
    """Architecture of a checkpoint with the recurrences of a run.

    Raises
    ------
    ValueError
        If the checkpoint can't be read, lacks positions for the rows, or doesn't have that many recurrences.
    """
    read_architecture(init_from)
    try:
        config = LoopedConfig.from_pretrained(
            init_from,
            num_recurrences=recurrences,
            num_backprop_recurrences=backprop_recurrences,
        )
    except StrictDataclassError as error:
        raise ValueError(f"model: {error.__cause__ or error}") from error
    if config.max_position_embeddings < sequence_length:
        raise ValueError(
            f"data.sequence_length is {sequence_length}, above max_position_embeddings = "
            f"{config.max_position_embeddings} of {init_from}. Use shorter rows."
        )
    return config
