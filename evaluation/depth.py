"""Validation loss against recurrences at inference: what a trained loop gains or loses by other depths.

The rows are those that the run was validated on, read from the `data` folder beside it. The table has
one row per run and test_recurrences, which `python -m scaling depth` fits.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from hf_looped import LoopedForCausalLM
from scaling.runs import read_object, read_raw, status_of, write_table

from .lm import folder_sha256

KEY = ["run_id", "test_recurrences", "weights", "tokens"]  # what a measured loss belongs to


def depth_table(
    runs: Sequence[Path],
    recurrences: Sequence[int],
    out: Path,
    *,
    data: Path | None = None,
    max_rows: int | None = None,
    batch_size: int = 16,
) -> pd.DataFrame:
    """Measure every run at every number of recurrences, and keep `out` up to date; what it has is not done again.

    Columns: run_id, recurrences (of training), test_recurrences, loss (nats per token), loss_stderr (over rows),
    tokens, weights. Losses are in float32: those of a run that was validated in bfloat16 differ by its rounding.
    data: folder of packed rows (default: `data` beside the run). max_rows: the first so many. Raises
    ValueError for a run that is unfinished or has no looped checkpoint, rows that it was not validated on, or
    recurrences that the model doesn't have.
    """
    loaded = [_Run(run, data, max_rows) for run in runs]
    table: list[Any] = read_raw(out).to_dict("records") if out.is_file() else []
    done = {tuple(str(row.get(name)) for name in KEY) for row in table}
    todo = [
        (run, t)
        for run in loaded
        for t in recurrences
        if tuple(map(str, (run.name, t, run.weights, run.tokens))) not in done
    ]
    for run, t in tqdm(todo, desc="recurrences", disable=None):
        loss, stderr = run.loss(t, batch_size)
        row = {"run_id": run.name, "recurrences": run.recurrences, "test_recurrences": t}
        row |= {"loss": loss, "loss_stderr": stderr, "tokens": run.tokens, "weights": run.weights}
        same = [(one["run_id"], one["test_recurrences"]) for one in table]
        if (run.name, t) in same:  # of other weights or rows
            table.pop(same.index((run.name, t)))
        table.append(row)
        write_table(pd.DataFrame(table), out)
    return pd.DataFrame(table)


class _Run:
    """A finished run: its model, loaded when it is first needed, and its validation rows."""

    def __init__(self, folder: Path, data: Path | None, max_rows: int | None) -> None:
        if not (folder / "run.json").is_file():
            raise ValueError(f"{folder}: there is no run.json. Give the folder of one run.")
        record = read_object(folder / "run.json")
        if status_of(record) != "finished":
            raise ValueError(f"{folder}: its status is {status_of(record)}. Finish it first.")
        checkpoint = folder / "checkpoint"
        if not (checkpoint / "config.json").is_file():
            raise ValueError(f"{folder}: it has no checkpoint. Train it again.")
        self.name, self.recurrences = str(record["run_id"]), int(record["recurrences"])
        self._checkpoint, self.weights = checkpoint, folder_sha256(checkpoint)
        rows, bos = _validation(data or folder.parent / "data", record, folder)
        self._rows, self._bos = rows[:max_rows], bos
        self.tokens = self._rows.shape[0] * (self._rows.shape[1] - 1)
        self._model: LoopedForCausalLM | None = None

    def loss(self, recurrences: int, batch_size: int) -> tuple[float, float | None]:
        """Mean loss, nats per token, and its standard error over rows (None for one row)."""
        if self._model is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._model = LoopedForCausalLM.from_pretrained(self._checkpoint).eval()
            self._model.to(device)  # type: ignore[arg-type]
        means = [
            mean
            for start in range(0, len(self._rows), batch_size)
            for mean in _row_losses(
                self._model, self._rows[start : start + batch_size], self._bos, recurrences
            )
        ]
        stderr = np.std(means, ddof=1) / math.sqrt(len(means)) if len(means) > 1 else None
        return float(np.mean(means)), None if stderr is None else float(stderr)


@torch.inference_mode()
def _row_losses(
    model: LoopedForCausalLM, rows: NDArray[Any], bos: int | None, recurrences: int
) -> Iterable[float]:
    """Mean loss of each row [T + 1]. bos: documents begin with it and don't see each other."""
    tokens = torch.as_tensor(rows.astype(np.int64), device=model.device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    places = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    if bos is not None:  # positions begin anew at every document
        places = places - torch.where(inputs == bos, places, 0).cummax(dim=1).values
    logits = model(
        input_ids=inputs,
        position_ids=None if bos is None else places,
        num_recurrences=recurrences,
        use_cache=False,
    ).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    found: list[float] = losses.double().mean(dim=1).tolist()
    return found


def _validation(
    data: Path, record: dict[str, Any], folder: Path
) -> tuple[NDArray[Any], int | None]:
    """Packed validation rows [rows, T + 1], and BOS where documents are kept apart."""
    path = data / "metadata.json"
    if not path.is_file():
        raise ValueError(
            f"{data}: there are no packed rows (metadata.json). Give the run's own data folder with --data."
        )
    metadata = json.loads(path.read_text(encoding="utf-8"))
    split = metadata["splits"]["validation"]
    if split["sha256"] != record.get("val_fingerprint"):
        raise ValueError(
            f"{data}: val_fingerprint is {split['sha256'][:12]}, but {folder.name} was validated on "
            f"{str(record.get('val_fingerprint'))[:12]}. Give its own data folder with --data."
        )
    shards = [np.load(one, mmap_mode="r") for one in sorted((data / "validation").glob("*.npy"))]
    apart = bool(record.get("separate_documents"))
    return np.concatenate(shards), int(metadata["tokenizer"]["bos_token_id"]) if apart else None


def recurrences_named(text: str) -> list[int]:
    """Parse `1,2,4,8`. Raises ValueError for what is no whole number of at least 1."""
    found = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise ValueError(
                f"--recurrences is {text!r}, but must list whole numbers of at least 1, as in 1,2,4,8."
            )
        found.append(int(part))
    return sorted(set(found))
