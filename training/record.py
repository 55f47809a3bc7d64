"""The run record: what run.json says of a run, one flat row of the run table.

Columns and units are those of the run table (`scaling.runs`); counts come from `hf_looped.accounting`.
"""

import hashlib
import json
import subprocess
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_looped import LoopedConfig
from hf_looped.accounting import (
    forward_flops_per_token,
    kv_bytes_per_token,
    parameters,
    weight_bytes,
)

from .config import TrainingConfig
from .files import write_text
from .initial import architecture_to_train
from .tokenizer import load_tokenizer
from .trajectories import expected_flops_per_token, flops_as_run

SCHEMA_VERSION = 1
# Fields that all runs of one law share; the rest are its axes, its variants, or matters of the machine.
RECIPE = ("batch_tokens", "data", "init_from", "optimizer", "transfer")
VERSIONED = ("torch", "transformers", "accelerate", "datasets", "tokenizers")


def architecture_of(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> LoopedConfig:
    """Return the model config of a run; given the tokenizer, with its special tokens, and its size checked.

    With `init_from` it is the checkpoint's, with the run's recurrences. Else the vocabulary is `model.vocab_size`, or
    the tokenizer's rounded up to a multiple of 64; it does not depend on the corpus, so that a run's FLOPs are known
    before there is any data.
    """
    if config.init_from is not None:
        architecture = architecture_to_train(
            config.init_from,
            config.model.recurrences,
            config.model.num_backprop_recurrences,
            config.data.sequence_length,
        )
        _check_vocabulary(architecture.vocab_size, tokenizer)
        return architecture
    vocab_size = config.model.vocab_size or -(-_planned_vocabulary(config) // 64) * 64
    ids: dict[str, int | None] = {}
    if tokenizer is not None:
        _check_vocabulary(vocab_size, tokenizer)
        ids = {
            f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
            for name in ("bos", "eos", "pad")
        }
    return config.model.build(vocab_size, config.data.sequence_length, **ids)


def _check_vocabulary(vocab_size: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is not None and len(tokenizer) > vocab_size:
        raise ValueError(
            f"model.vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} tokens. "
            f"Raise it to at least {len(tokenizer)}, leave it out, or use a smaller tokenizer."
        )


def _planned_vocabulary(config: TrainingConfig) -> int:
    if config.data.tokenizer is None:
        return config.data.vocab_size
    return len(load_tokenizer(config.data.tokenizer))


def plan_steps(config: TrainingConfig, architecture: LoopedConfig) -> int:
    """Optimiser steps of a run: as asked, or round(C / (FLOPs per token · batch)), at least one."""
    if config.steps is not None:
        return config.steps
    assert config.budget_flops is not None
    flops = expected_flops_per_token(config, architecture)
    return max(1, round(config.budget_flops / (flops * config.batch_tokens)))


def describe(config: TrainingConfig, architecture: LoopedConfig) -> dict[str, Any]:
    """Everything of the record that is known before training."""
    count = parameters(architecture)
    steps = plan_steps(config, architecture)
    tokens = steps * config.batch_tokens
    train_flops = expected_flops_per_token(config, architecture)
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": config.name,
        "variant": config.variant,
        "recipe_sha256": recipe_sha256(config),
        "seed": config.seed,
        "recurrences": architecture.num_recurrences,
        "shared_depth": config.model.shared_depth,
        "effective_depth": architecture.num_hidden_layers,
        "num_prelude_layers": architecture.num_prelude_layers,
        "num_recurrent_layers": architecture.num_recurrent_layers,
        "num_coda_layers": architecture.num_coda_layers,
        "hidden_size": architecture.hidden_size,
        "sequence_length": config.data.sequence_length,
        "vocab_size": architecture.vocab_size,
        "injection": architecture.injection,
        "init_from": config.init_from,
        "backprop_recurrences": architecture.backprop_recurrences,
        "sample_recurrences": config.model.samples,
        "adapter_rank": architecture.adapter_rank,
        "time_conditioning": architecture.time_conditioning,
        "exit_gate": architecture.exit_gate,
        "budget_flops": float(config.budget_flops or train_flops * tokens),
        "train_flops_per_token": train_flops,
        "forward_flops_per_token": forward_flops_per_token(
            architecture, config.data.sequence_length
        ),
        "total_flops": flops_as_run(config, architecture, steps),
        "n_once": count.once,
        "n_rec": count.rec,
        "n_injection": count.injection,
        "n_norm": count.norm,
        "n_embedding": count.embedding,
        "weight_bytes": weight_bytes(architecture),
        "kv_bytes_per_token": kv_bytes_per_token(architecture),
        "steps": steps,
        "batch_tokens": config.batch_tokens,
        "tokens": tokens,
        "separate_documents": config.data.separate_documents,
    }


def recipe_sha256(config: TrainingConfig) -> str:
    """Fingerprint of data, batch and rates, so that a table tells runs of different recipes apart."""
    fields = {name: value for name, value in asdict(config).items() if name in RECIPE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """Versions and, in a git checkout, the commit."""
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return {
        "versions": " ".join(f"{name}={version(name)}" for name in VERSIONED),
        "git_commit": git.stdout.strip() or None,
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Replace run.json in one step, so that a reader sees the old record or the new one."""
    write_text(folder / "run.json", json.dumps(record, indent=1))


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a run folder, None if it has none yet.

    Raises ValueError if run.json is no record.
    """
    path = folder / "run.json"
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        record["status"]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}). Delete it: the run goes on from its last state."
        ) from error
    return record
