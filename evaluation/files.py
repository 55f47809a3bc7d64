"""Files that are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old text or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError naming the file and the remedy for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error}). {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, not an object. {remedy}")
    return found


def read_tables(path: Path, remedy: str) -> dict[str, dict[str, Any]]:
    """Read a JSON object of objects; errors as in `read_object`."""
    found = read_object(path, remedy)
    for name, value in found.items():
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {name} is {value!r}, not an object. {remedy}")
    return found
