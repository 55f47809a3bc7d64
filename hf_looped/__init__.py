# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Looped language models for Hugging Face Transformers.

Importing this package registers the architecture, so that AutoConfig, AutoModel and AutoModelForCausalLM load its
checkpoints.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .adaptive_depth import AdaptiveDepth
from .configuration_looped import LoopedConfig
from .modeling_looped import LoopedForCausalLM, LoopedModel, LoopedPreTrainedModel

AutoConfig.register(LoopedConfig.model_type, LoopedConfig, exist_ok=True)
AutoModel.register(LoopedConfig, LoopedModel, exist_ok=True)
AutoModelForCausalLM.register(LoopedConfig, LoopedForCausalLM, exist_ok=True)

__all__ = [
    "AdaptiveDepth",
    "LoopedConfig",
    "LoopedForCausalLM",
    "LoopedModel",
    "LoopedPreTrainedModel",
]
