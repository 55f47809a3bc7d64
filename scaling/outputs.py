"""Files written in one piece: text and strict JSON."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Write plain values as strict JSON (no NaN)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in one piece: beside its destination, then moved over it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
