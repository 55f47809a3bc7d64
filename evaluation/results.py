"""Results of a model on disk: evaluation.json beside a run's record, or a file of its own.

`evaluations` holds every result by model, revision and recurrences; the flat `loss/<task>` and
`loss/<axis>` beside it are those of the model's own recurrences, which the run table takes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import write_text
from .suite import AXES, PREFIX

Results = dict[str, Any]

SAME = ("version", "data_sha256", "limit", "mc_rule", "max_length", "dtype")  # else scored again


def read_results(path: Path) -> Results:
    """Read a file of results, empty if there is none. Raises ValueError when it is damaged."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error}). Remove it to score again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, not an object. Remove it.")
    return found


def scored(results: Results, key: str, task: str, settings: Mapping[str, Any]) -> bool:
    """Whether a task was scored for this model with these settings."""
    known = results.get("evaluations", {}).get(key, {}).get(task)
    return known is not None and all(
        known.get(name) == settings[name] for name in SAME if name in settings
    )


def with_result(results: Results, key: str, task: str, result: Results) -> Results:
    """Add one task's result to those of a model."""
    evaluations = results.get("evaluations", {})
    own = {**evaluations.get(key, {}), task: result}
    return {**results, "evaluations": {**evaluations, key: own}}


def with_losses(results: Results, key: str, *, incomplete: bool = False) -> Results:
    """Set the flat losses to those of one model; an axis that lacks a task has none unless `incomplete`."""
    own = results.get("evaluations", {}).get(key, {})
    kept = {name: value for name, value in results.items() if not name.startswith("loss/")}
    losses = {f"loss/{task}": result["loss"] for task, result in own.items()}
    for axis, tasks in AXES.items():
        mean = axis_loss(own, tasks, incomplete=incomplete)
        if mean is not None:
            losses[f"loss/{axis}"] = mean
    return {**losses, **kept}


def axis_loss(
    results: Mapping[str, Mapping[str, Any]], tasks: Sequence[str], *, incomplete: bool
) -> float | None:
    """Mean of an axis' task losses, nats per token; None where one is missing, or all are."""
    found = [float(results[task]["loss"]) for task in tasks if task in results]
    if not found or (len(found) < len(tasks) and not incomplete):
        return None
    return sum(found) / len(found)


def write_results(path: Path, results: Results) -> None:
    """Replace a file of results in one step."""
    write_text(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Lines of a model's losses, task by task, then the axes that are complete."""
    lines = []
    for name, one in results.items():
        error = "" if one["loss_stderr"] is None else f" ± {one['loss_stderr']:.4f}"
        marks = ", partial" if one["partial"] else ""
        lines.append(
            f"  {PREFIX + name:32} {one['loss']:.4f}{error} nats per token, accuracy {one['accuracy']:.3f} "
            f"({one['documents']} documents, {one['truncated']} cut{marks})"
        )
    for axis, tasks in AXES.items():
        mean = axis_loss(results, tasks, incomplete=False)
        if mean is not None:
            lines.append(f"  {axis:32} {mean:.4f} nats per token (mean of {len(tasks)} tasks)")
    return "\n".join(lines)
