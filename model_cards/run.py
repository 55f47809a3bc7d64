"""Read a finished run directory, and check that its files are of one run.

The files are what `python -m training` leaves: config.yaml (recipe), run.json (record), log.jsonl, checkpoint/, and
evaluation.json where there was an evaluation.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer

from hf_looped import LoopedConfig
from hf_looped.accounting import (
    forward_flops_per_token,
    kv_bytes_per_token,
    parameters,
    train_flops_per_token,
    weight_bytes,
)
from scaling.runs import SCHEMA_VERSION, status_of

# What the card needs of run.json, by kind, and of config.yaml, by section.
TEXTS = (
    "run_id variant recipe_sha256 injection corpus corpus_sources corpus_fingerprint data_fingerprint val_fingerprint "
    "precision attention orthogonalise device"
).split()
COUNTS = (
    "seed recurrences num_prelude_layers num_recurrent_layers num_coda_layers hidden_size vocab_size "
    "backprop_recurrences n_once n_rec n_injection n_norm n_embedding weight_bytes kv_bytes_per_token "
    "forward_flops_per_token train_flops_per_token total_flops sequence_length steps batch_tokens "
    "tokens val_tokens num_processes"
).split()
NUMBERS = ("budget_flops", "val_loss", "wall_s", "tokens_per_s")
RECIPE = {
    "data": (
        "tokenizer dataset_config document_characters validation_fraction separate_documents allow_repeat"
    ).split(),
    "optimizer": (
        "muonh_lr embedding_lr lm_head_lr norm_lr hyperconnection_lr momentum betas eps final_lr_fraction"
    ).split(),
    "transfer": (
        "reference_width reference_batch_tokens reference_recurrences tokens_per_parameter width_exponent "
        "batch_exponent tokens_exponent"
    ).split(),
}
ROLES = ("matrix", "embedding", "lm_head", "norm", "scalar")  # of the log's columns lr/<role>


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run as its directory tells it.

    record: run.json, and `loss/…` of evaluation.json. recipe: config.yaml. config: the checkpoint's architecture.
    tokenizer_size: tokens of its tokenizer. sources: what the corpus was made from, packages with versions, files with
    sizes, or a Hub dataset with config and split. peak_rates: peak learning rate of each role.
    """

    record: Mapping[str, Any]
    recipe: Mapping[str, Any]
    config: LoopedConfig
    tokenizer_size: int
    sources: Mapping[str, str]
    peak_rates: Mapping[str, float]


def read_run(run_dir: Path) -> Run:
    """Read a run directory.

    Raises ValueError, naming file and field, if it is none, is not finished, lacks something, or if its files disagree.
    """
    record = _read_record(run_dir)
    recipe = _read_recipe(run_dir / "config.yaml")
    checkpoint = run_dir / "checkpoint"
    config = _read_config(checkpoint)
    _refuse_disagreement(run_dir / "run.json", record, config)
    try:
        tokenizer_size = len(AutoTokenizer.from_pretrained(checkpoint))
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())
        raise ValueError(f"{checkpoint} has no tokenizer that loads: {reason}") from error
    return Run(
        record=record,
        recipe=recipe,
        config=config,
        tokenizer_size=tokenizer_size,
        sources=_parse(f"{run_dir / 'run.json'}, corpus_sources", record["corpus_sources"]),
        peak_rates=_peak_rates(run_dir / "log.jsonl", record["steps"], recipe["optimizer"]),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; ValueError if it doesn't."""
    return _parse(path, _read(path))


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_record(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "run.json"
    if not path.is_file():
        raise ValueError(
            f"{run_dir} is no run directory: it has no run.json. Give the folder of one run, e.g. runs/NAME."
        )
    record = read_json(path)
    status = status_of(record)
    if status != "finished":
        remedy = "Choose another run." if status == "diverged" else "Run it to its end first."
        raise ValueError(
            f"{path}: status is {status!r}, but a card describes a finished run. {remedy}"
        )
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version is {record.get('schema_version')}, but this version of hf-looped reads "
            f"{SCHEMA_VERSION}. Use the version that wrote it."
        )
    for name in (*TEXTS, *COUNTS, *NUMBERS):
        _refuse_bad_field(path, record, name)
    beside = run_dir / "evaluation.json"
    further = read_json(beside) if beside.is_file() else {}
    own = {name: value for name, value in record.items() if value is not None}
    for name, value in (further | own).items():
        if name.startswith("loss/") and value is not None:
            if not is_number(value):
                raise ValueError(
                    f"{path if name in own else beside}: {name} is {value!r}, but must be a finite number of nats per "
                    "token. Evaluate again."
                )
            record[name] = value
    return record


def _refuse_bad_field(path: Path, record: Mapping[str, Any], name: str) -> None:
    if record.get(name) is None:
        raise ValueError(
            f"{path}: {name} is missing, but the card needs it. Another version of hf-looped may have written the "
            "record; run it again with this one."
        )
    value = record[name]
    if name in TEXTS:
        good, kind = isinstance(value, str), "a text"
    elif name in COUNTS:
        good, kind = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        good, kind = is_number(value), "a finite number"
    if not good:
        raise ValueError(f"{path}: {name} is {value!r}, but must be {kind}. Run it again.")


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(_read(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
    for section, names in RECIPE.items():
        fields = recipe.get(section) if isinstance(recipe, dict) else None
        for name in names:
            if not isinstance(fields, dict) or name not in fields:
                raise ValueError(
                    f"{path}: {section}.{name} is missing, but the card needs it. Give the run's own, resolved recipe."
                )
    return dict(recipe)


def _read_config(checkpoint: Path) -> LoopedConfig:
    path = checkpoint / "config.json"
    if not path.is_file() or not any(checkpoint.glob("*.safetensors")):
        raise ValueError(
            f"{checkpoint} holds no model (config.json and *.safetensors), but a card belongs to one. Run it again."
        )
    kind = read_json(path).get("model_type")
    if kind != LoopedConfig.model_type:
        raise ValueError(
            f"{path}: model_type is {kind!r}, but must be {LoopedConfig.model_type!r}: the card is for looped models."
        )
    try:
        return LoopedConfig.from_pretrained(checkpoint)
    except (StrictDataclassError, TypeError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{path} is no valid architecture: {reason}") from error


def _refuse_disagreement(path: Path, record: Mapping[str, Any], config: LoopedConfig) -> None:
    """Compare the record's counts with those of the checkpoint's architecture."""
    length, count = record["sequence_length"], parameters(config)
    flops = train_flops_per_token(config, length)
    expected = {
        "recurrences": config.num_recurrences,
        "num_prelude_layers": config.num_prelude_layers,
        "num_recurrent_layers": config.num_recurrent_layers,
        "num_coda_layers": config.num_coda_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "injection": config.injection,
        "backprop_recurrences": config.backprop_recurrences,
        "n_once": count.once,
        "n_rec": count.rec,
        "n_injection": count.injection,
        "n_norm": count.norm,
        "n_embedding": count.embedding,
        "weight_bytes": weight_bytes(config),
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "forward_flops_per_token": forward_flops_per_token(config, length),
        "train_flops_per_token": flops,
        "tokens": record["steps"] * record["batch_tokens"],
        "total_flops": flops * record["tokens"],
    }
    for name, value in expected.items():
        if record[name] != value:
            raise ValueError(
                f"{path}: {name} is {record[name]}, but the checkpoint and the other fields give {value}: they are not "
                "of one run, or another version of hf-looped wrote them. Use that version, or run it again."
            )


def _peak_rates(path: Path, steps: int, optimizer: Mapping[str, Any]) -> dict[str, float]:
    """Peak learning rates, from the log's last entry and the schedule: linear from 1 at step 0 to f at `steps`."""
    lines = _read(path).splitlines()
    last = _parse(path, lines[-1]) if lines else {}
    if last.get("step") != steps:
        raise ValueError(
            f"{path} ends at step {last.get('step')}, but the run has {steps} steps: they are not of one run, or "
            "the log was cut. Run it again."
        )
    fraction = optimizer["final_lr_fraction"]
    factor = fraction + (1 - fraction) / steps  # of the last step, number steps − 1
    return {role: last[f"lr/{role}"] / factor for role in ROLES if f"lr/{role}" in last}


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file, but the card needs it.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}).") from error


def _parse(place: Path | str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place}: holds a {type(value).__name__}, but must hold one JSON object.")
    return value
