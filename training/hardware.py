"""What the machine does fast: precision, attention and the dtype of the orthogonalisation, chosen by rule.

The rules are the same for every run of a grid on one kind of machine; the choices stand in the run record.
"""

import os

import torch
from transformers.utils import is_flash_attn_2_available

from .config import TrainingConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def multiplies_bf16() -> bool:
    """Whether this machine has bfloat16 matrix products in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def choose_precision(config: TrainingConfig) -> str:
    """Return "bf16" (autocast, float32 master weights) where the hardware multiplies it, else "fp32"."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if multiplies_bf16() else "fp32"


def choose_attention(config: TrainingConfig) -> str:
    """Return SDPA; on CPUs the model itself takes plain products where they are faster (hf_looped.cpu_ops)."""
    if config.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ValueError(
            "attention is 'flash_attention_2', but flash-attn or a CUDA device is missing: pip install -e .[flash] on "
            "a machine with one, or use attention=auto."
        )
    return "sdpa" if config.attention == "auto" else config.attention


def choose_orthogonalise_dtype(config: TrainingConfig) -> torch.dtype:
    """Dtype of MuonH's orthogonalisation."""
    if config.optimizer.orthogonalise != "auto":
        return DTYPES[config.optimizer.orthogonalise]
    return torch.bfloat16 if multiplies_bf16() else torch.float32


def check_launch() -> None:
    """Refuse a launch that would train otherwise than it was asked to.

    `accelerate launch --cpu --num_processes n` starts one process in silence; it sets the rendezvous address all the
    same. Accelerate's own FSDP is not used: version 1 flattens the matrices that MuonH needs whole.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise ValueError(
            "accelerate launch was asked for FSDP: the trainer shards by itself. Set sharding=fsdp2 in the recipe and "
            "launch without --use_fsdp. (FSDP1 can't be used: it flattens the matrices that MuonH needs whole.)"
        )
    launched = (
        os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    )
    if launched and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "num_processes is above 1, but on CPUs accelerate launch starts only one process, in silence. Use torchrun "
            "--nproc_per_node N -m training … instead, or ask for one process. (If one was asked, unset MASTER_ADDR.)"
        )
