"""Score one model on tasks, a task at a time, through lm-eval's evaluator."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lm_eval
import transformers
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from .lm import LoopedLM
from .prepare import read_sources
from .rows import SHUFFLE_SEED
from .suite import PREFIX, TASKS, VERSION
from .task import SHOT_SEED, LoopedTask

YAML = Path(__file__).parent / "tasks"
MANY_TRUNCATED = 0.01  # of the documents, above which a result comes with a warning


def load_task(name: str, data: Path, mc_rule: str | None) -> LoopedTask:
    """Load one task of the suite with its rows."""
    metadata = {"data_dir": str(data)} | ({} if mc_rule is None else {"mc_rule": mc_rule})
    manager = TaskManager(include_path=str(YAML), include_defaults=False, metadata=metadata)
    task = manager.load([PREFIX + name])["tasks"][PREFIX + name]
    assert isinstance(task, LoopedTask)
    return task


def settings_of(name: str, data: Path, limit: int | None, mc_rule: str | None) -> dict[str, Any]:
    """Collect what a result depends on beside the model: data, limit, rule of multiple choice."""
    source = read_sources(data).get(name, {})
    info = TASKS[name]
    return {
        "version": VERSION,
        "data_sha256": source.get("sha256"),
        "partial": bool(source.get("partial", True)) or (limit is not None and limit < info.used),
        "limit": limit,
        "mc_rule": (mc_rule or "shared_prefix") if info.choices else None,
        "shots": info.shots,
        "seeds": {"shuffle": SHUFFLE_SEED, "shots": SHOT_SEED},
        "licence": source.get("licence", info.licence),
    }


def run_task(lm: LoopedLM, task: LoopedTask, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Score a model on a task; None on all processes but the first."""
    name = task.info.name
    asked = min(settings["limit"] or len(task.eval_docs), len(task.eval_docs))
    if asked < lm.world_size:
        raise ValueError(
            f"{PREFIX}{name}: {asked} documents for {lm.world_size} processes. Start fewer, or raise --limit."
        )
    try:
        found = evaluate(
            lm,
            {"tasks": {PREFIX + name: task}, "groups": {}, "group_map": {}},
            limit=settings["limit"],
            log_samples=False,
            bootstrap_iters=1,
        )
    except ValueError as error:
        raise ValueError(f"{PREFIX}{name}: {error}") from error
    if found is None:
        return None
    numbers = {
        key.removesuffix(",none"): value for key, value in found["results"][PREFIX + name].items()
    }
    documents = int(numbers["sample_len"])
    truncated = int(numbers["truncated"])
    if truncated > MANY_TRUNCATED * documents:
        warnings.warn(
            f"{PREFIX}{name}: {truncated} of {documents} prompts were cut from the left to {lm.max_length} tokens "
            "(shots and BOS are lost first). --max-length raises the context where the model can take it.",
            stacklevel=2,
        )
    return {
        "loss": numbers["nll_per_token"],
        "loss_stderr": _or_none(numbers["nll_per_token_stderr"]),
        "accuracy": numbers["acc"],
        "accuracy_stderr": _or_none(numbers["acc_stderr"]),
        "bits_per_byte": numbers["bits_per_byte"],
        "documents": documents,
        "tokens": int(numbers["tokens"]),
        "truncated": truncated,
        "merged": int(numbers["merged"]),
        **settings,
        **model_settings(lm),
    }


def model_settings(lm: LoopedLM) -> dict[str, Any]:
    """How a model was run."""
    return {
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "batch_size": lm.batch_size,
        "max_length": lm.max_length,
        "num_recurrences": lm.num_recurrences,
        "revision": lm.revision,
        "weights": lm.weights,
        "bos": lm.add_bos_token,
        "processes": lm.world_size,
        "lm_eval": lm_eval.__version__,
        "transformers": transformers.__version__,
    }


def _or_none(value: Any) -> float | None:
    """Give a standard error, None where a single document has none."""
    return None if isinstance(value, str) or math.isnan(value) else float(value)
