"""Results of a model on disk: evaluation.json beside a run's record, or a file of its own.

`evaluations` holds every result by model, revision and recurrences; the flat `loss/<task>` and
`loss/<axis>` beside it are those of the model's own recurrences, which the run table takes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import read_object, write_text
from .suite import AXES, PREFIX, TASKS

Results = dict[str, Any]

# What a result depends on beside model and recurrences: else it is scored again.
SAME = ("version", "data_sha256", "limit", "mc_rule", "weights", "asked")
ALIKE = ("limit", "weights", "asked")  # what the tasks of an axis must have in common


def read_results(path: Path) -> Results:
    """Read a file of results, empty if there is none. Raises ValueError when it is damaged."""
    if not path.is_file():
        return {}
    remedy = "Remove it to score again."
    found = read_object(path, remedy)
    models = found.get("evaluations", {})
    for key, tasks in models.items() if isinstance(models, dict) else [("evaluations", models)]:
        for name, one in tasks.items() if isinstance(tasks, dict) else [("", tasks)]:
            if not isinstance(one, dict) or not isinstance(one.get("loss"), int | float):
                raise ValueError(
                    f"{path}: {' '.join((key, name)).strip()} is {str(one)[:60]}, not a result. {remedy}"
                )
    return found


def scored(results: Results, key: str, task: str, settings: Mapping[str, Any]) -> bool:
    """Whether a task was scored for this model with these settings."""
    known = results.get("evaluations", {}).get(key, {}).get(task)
    return known is not None and all(known.get(name) == settings[name] for name in SAME)


def with_result(results: Results, key: str, task: str, result: Results) -> Results:
    """Add one task's result to those of a model."""
    evaluations = results.get("evaluations", {})
    own = {**evaluations.get(key, {}), task: result}
    return {**results, "evaluations": {**evaluations, key: own}}


def with_losses(results: Results, key: str, *, incomplete: bool = False) -> Results:
    """Set the suite's flat losses to those of one model; an axis that lacks a task has none unless `incomplete`."""
    own = results.get("evaluations", {}).get(key, {})
    suite = {f"loss/{name}" for name in (*TASKS, *AXES)}
    kept = {name: value for name, value in results.items() if name not in suite}
    losses = {f"loss/{task}": result["loss"] for task, result in own.items()}
    for axis, tasks in AXES.items():
        mean = axis_loss(own, tasks, incomplete=incomplete)
        if mean is not None:
            losses[f"loss/{axis}"] = mean
    return {**losses, **kept}


def axis_loss(
    results: Mapping[str, Mapping[str, Any]], tasks: Sequence[str], *, incomplete: bool
) -> float | None:
    """Mean of an axis' task losses, nats per token.

    None where one is missing, unless `incomplete`, where all are, or where they were not scored alike.
    """
    found = [results[task] for task in tasks if task in results]
    if not found or (len(found) < len(tasks) and not incomplete) or not _alike(found):
        return None
    return sum(float(one["loss"]) for one in found) / len(found)


def _alike(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether results are of the same weights and settings."""
    return all(one.get(name) == results[0].get(name) for one in results for name in ALIKE)


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
        elif set(tasks) <= set(results):
            lines.append(f"  {axis:32} no mean: its tasks were scored with different settings")
    return "\n".join(lines)
