"""Rows of a task in a data folder: DIR/<task>.jsonl, written by `python -m evaluation prepare`.

On loading they are shuffled once with a fixed seed, capped at 10,000 and numbered. Fields: context and
continuation, or query, choices and gold; then `prompt` and `target`, what is asked and what is scored.
"""

import json
import random
from pathlib import Path
from typing import Any

from .suite import MOST_ROWS, TASKS, TaskInfo

Row = dict[str, Any]

SHUFFLE_SEED = 1337


def load_rows(folder: Path, name: str) -> list[Row]:
    """Read, check, shuffle and number a task's rows. Raises ValueError naming file, row and remedy."""
    rows = read_rows(folder / f"{name}.jsonl", TASKS[name], folder)
    random.Random(SHUFFLE_SEED).shuffle(rows)
    rows = rows[:MOST_ROWS]
    shots = TASKS[name].shots
    if len(rows) <= shots:
        raise ValueError(
            f"{folder / name}.jsonl: {len(rows)} rows, but the task takes {shots} others as shots and "
            f"needs more than {shots}. Prepare more rows."
        )
    return [_asked(row, index) for index, row in enumerate(rows)]


def _asked(row: Row, index: int) -> Row:
    """Add a row's number, its prompt and its target: an answer after one space, or a choice's number."""
    if "choices" in row and "query" in row:
        asked = {"prompt": f"{row['query']}\nAnswer:", "target": row["gold"]}
    else:
        asked = {"prompt": row["context"], "target": f" {row['continuation']}"}
    return {**row, **asked, "index": index}


def read_rows(path: Path, task: TaskInfo, folder: Path | None = None) -> list[Row]:
    """Read and check the rows of a file, in its order."""
    if not path.is_file():
        where = folder or path.parent
        raise ValueError(
            f"{path}: there is no such file. Write it with `python -m evaluation prepare --out {where} "
            f"--tasks looped_{task.name}` (--from DIR takes rows you have)."
        )
    rows = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        line = _decoded(raw, number, path)
        if line.strip():
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place}: not JSON ({error}). One JSON object a line.") from error
            rows.append(checked(row, task, place))
    return rows


def _decoded(raw: bytes, number: int, path: Path) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: not UTF-8 ({error}). Save the file as UTF-8."
        ) from error


def checked(row: Any, task: TaskInfo, place: str) -> Row:
    """Keep a row's fields that the task reads, with one form of white space at the joint.

    The context loses trailing white space and the answers leading white space: exactly one space stands between.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{place}: {type(row).__name__}, not an object. One JSON object a line.")
    if not task.choices:
        context = _text(row, "context", place).rstrip()
        if not context and task.shots:
            raise ValueError(
                f"{place}: context is empty, so that the blank line after the shots would be scored. Leave the row out."
            )
        return {"context": context, "continuation": _answer(row, "continuation", place)}
    choices = row.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"{place}: choices is {choices!r}, but must list two or more answers.")
    gold = row.get("gold")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
        raise ValueError(
            f"{place}: gold is {gold!r}, but must be the number of one of {len(choices)} choices, from 0."
        )
    named = {f"choices[{k}]": choice for k, choice in enumerate(choices)}
    return {
        "query": _text(row, "query", place).rstrip(),
        "choices": [_answer(named, name, place) for name in named],
        "gold": gold,
    }


def _text(row: Row, name: str, place: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        found = "is missing" if name not in row else f"is {value!r}"
        raise ValueError(f"{place}: {name} {found}, but must be a text. Prepare the file again.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: {name} holds half of a surrogate pair ({error}). Mend the text, or leave the row out."
        ) from error
    return value


def _answer(row: Row, name: str, place: str) -> str:
    value = _text(row, name, place).lstrip()
    if not value:
        raise ValueError(
            f"{place}: {name} is empty, so that nothing could be scored. Leave the row out."
        )
    return value
