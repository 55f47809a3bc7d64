"""Write each task's rows once, so that evaluation never touches the network.

From the Hub, from a folder of `<task>.jsonl` (the CORE bundle's files have these names), or generated.
`sources.json` beside them records where rows are from, their licence, number and fingerprint.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import read_tables, write_text
from .rows import read_rows
from .sources import rows_from_hub
from .suite import TASKS, TaskInfo
from .synthetic import SHA256, fingerprint, generated

SOURCES = "sources.json"


def prepare(
    out: Path, tasks: Sequence[str], *, source: Path | None = None, partial: bool = False
) -> dict[str, dict[str, Any]]:
    """Write out/<task>.jsonl for every task, in place of what was there.

    `source` is a folder of <task>.jsonl; tasks that it lacks come from the Hub or are generated.
    Fewer rows than the suite has are refused unless `partial`; results then say so. Returns what
    sources.json says of these tasks. Raises ValueError naming task, file and remedy.
    """
    out.mkdir(parents=True, exist_ok=True)
    known = read_sources(out)
    for name in tasks:
        rows, origin = _rows(TASKS[name], source)
        _refuse_wrong_count(TASKS[name], rows, origin, partial)
        write_text(
            out / f"{name}.jsonl",
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        )
        known[name] = {
            "source": origin,
            "licence": TASKS[name].licence,
            "rows": len(rows),
            "partial": len(rows) < TASKS[name].rows,
            "sha256": fingerprint(rows),
            "file_sha256": _file_sha256(out / f"{name}.jsonl"),
        }
        write_text(out / SOURCES, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    return {name: known[name] for name in tasks}


def read_sources(folder: Path) -> dict[str, dict[str, Any]]:
    """Read what a data folder says of its tasks, nothing if it was not written by `prepare`."""
    path = folder / SOURCES
    if not path.is_file():
        return {}
    return read_tables(path, "Prepare the folder again.")


def refuse_edited_rows(folder: Path, name: str) -> None:
    """Raise ValueError if a task's file is not the one that `prepare` wrote: results name its fingerprint."""
    path, told = folder / f"{name}.jsonl", read_sources(folder).get(name, {})
    if _file_sha256(path) != told.get("file_sha256"):
        raise ValueError(
            f"{path} is not as `prepare` wrote it, but results would bear the old rows' fingerprint. Run `python -m "
            f"evaluation prepare --out {folder} --from {folder} --partial --tasks {name}` to take these rows."
        )


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rows(task: TaskInfo, source: Path | None) -> tuple[list[dict[str, Any]], str]:
    """Rows of a task and where they are from."""
    if source is not None and (source / f"{task.name}.jsonl").is_file():
        return read_rows(source / f"{task.name}.jsonl", task), f"{task.name}.jsonl"
    if task.name in SHA256:
        rows = generated()[task.name]
        assert fingerprint(rows) == SHA256[task.name]
        return rows, "generated"
    if task.hub is None:
        raise ValueError(
            f"looped_{task.name}: its rows are {task.name}.jsonl of the CORE bundle (DataComp-LM), which has "
            "no place on the Hub. Give the folder that holds the file with --from DIR."
        )
    return _from_hub(task), "/".join(part for part in task.hub if part)


def _from_hub(task: TaskInfo) -> list[dict[str, Any]]:
    from datasets import load_dataset  # only here: slow to import

    assert task.hub is not None
    repository, config, split = task.hub
    try:
        return rows_from_hub(task.name, load_dataset(repository, config, split=split))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"looped_{task.name}: {repository} could not be loaded from the Hub "
            f"({type(error).__name__}: {error}). Prepare it where there is a network, or give rows with --from DIR."
        ) from error


def _refuse_wrong_count(task: TaskInfo, rows: Sequence[Any], origin: str, partial: bool) -> None:
    if len(rows) > task.rows or (len(rows) < task.rows and not partial):
        remedy = (
            "--partial accepts fewer and marks the results."
            if len(rows) < task.rows
            else "Another version of the data, perhaps."
        )
        raise ValueError(
            f"looped_{task.name}: {len(rows)} rows from {origin}, but the suite has {task.rows}. {remedy}"
        )
    if len(rows) <= task.shots:
        raise ValueError(
            f"looped_{task.name}: {len(rows)} rows from {origin}, but {task.shots} shots are drawn from the others. "
            "Give more rows."
        )
