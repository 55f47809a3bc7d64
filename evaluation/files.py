"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old text or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
