"""What a grid will take before anything runs: FLOPs, time here, GPU-hours, disk.

States hold weights and the optimiser's state in float32: one momentum for each weight of MuonH's matrices, two moments
for each of AdamW's. Logs, tokenizers and counters are left out (megabytes at most).
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table

if TYPE_CHECKING:  # `status` is quick without torch
    from .grid import PlannedRun

BYTES = 4  # of a float32 weight
MFU = 0.4
PEAK_FLOPS = 9.89e14  # FLOPs per second of an H100 (SXM) in dense bfloat16


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes: packed data, states of the runs that run at once, and the finished models of all runs."""

    data: int
    states: int
    models: int

    @property
    def peak(self) -> int:
        """Bytes while the last runs run."""
        return self.data + self.states + self.models

    @property
    def end(self) -> int:
        """Bytes that stay."""
        return self.data + self.models


def state_bytes(run: "PlannedRun") -> int:
    """Bytes of one state to resume from: weights and optimiser."""
    matrices = run.record["n_once"] + run.record["n_rec"]
    others = run.record["n_norm"] + run.record["n_embedding"]
    return BYTES * (2 * matrices + 3 * others)


def model_bytes(run: "PlannedRun") -> int:
    """Bytes of the finished model, float32 weights."""
    parts = ("n_once", "n_rec", "n_norm", "n_embedding")
    return BYTES * sum(run.record[name] for name in parts)


def data_bytes(runs: Sequence["PlannedRun"]) -> int:
    """Bytes of the rows that the longest run reads, at least; a larger corpus, and its own text, take more."""
    length, record = runs[0].config.data.sequence_length, runs[0].record
    token = 2 if record["vocab_size"] <= 2**16 else 4
    return token * max(run.record["tokens"] for run in runs) * (length + 1) // length


def disk(runs: Sequence["PlannedRun"], jobs: int) -> Disk:
    """Disk of runs that have not ended, the `jobs` largest at once: each keeps its states and writes one more."""
    states = sorted(state_bytes(run) * (run.config.checkpoints_kept + 1) for run in runs)
    packed = bool(runs) and runs[0].config.data_folder.exists()
    return Disk(
        data=data_bytes(runs) if runs and not packed else 0,
        states=sum(states[-jobs:]),
        models=sum(map(model_bytes, runs)),
    )


def free_bytes(out: Path) -> int:
    """Bytes free on the disk where a folder is, or will be."""
    place = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    return shutil.disk_usage(place).free


def gpu_hours(flops: float, mfu: float = MFU, peak_flops: float = PEAK_FLOPS) -> float:
    """Hours of one GPU of `peak_flops` FLOPs per second that reaches a share `mfu` (model FLOPs utilisation)."""
    if not (0 < mfu <= 1 and peak_flops > 0):
        raise ValueError(
            f"--mfu is {mfu} and --peak-flops {peak_flops:g}: a share in (0, 1] and a positive number of FLOPs per "
            "second are needed."
        )
    return flops / (mfu * peak_flops) / 3600


def plan_table(runs: Sequence["PlannedRun"], jobs: int) -> Table:
    """Table of the plan: parameters, tokens, steps, FLOPs and estimated time of each run, and their sums."""
    total = sum(run.seconds for run in runs) / jobs
    flops = sum(run.record["total_flops"] for run in runs)
    table = Table(
        title=f"{len(runs)} runs, {flops:.3g} FLOPs, about {duration(total)} with {jobs} at a time",
        caption="N: parameters without embeddings and norms. Time: FLOPs at the rate measured for one layer here.",
    )
    for name in ("run", "N", "tokens", "steps", "FLOPs", "time"):
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
    for run in runs:
        record = run.record
        table.add_row(
            run.config.name,
            f"{record['n_once'] + record['n_rec']:,}",
            f"{record['tokens']:,}",
            f"{record['steps']:,}",
            f"{record['total_flops']:.3g}",
            duration(run.seconds),
        )
    return table


def needs(runs: Sequence["PlannedRun"], jobs: int, mfu: float, peak_flops: float) -> str:
    """GPU-hours and disk of the runs in two sentences."""
    flops = sum(run.record["total_flops"] for run in runs)
    need = disk(runs, jobs)
    hours = gpu_hours(flops, mfu, peak_flops)
    return (
        f"GPU-hours: {hours:.3g} at {mfu:.0%} of {peak_flops:.3g} FLOPs/s. Disk: {decimal(need.peak)} while "
        f"{min(jobs, len(runs))} run at once (data {decimal(need.data)}, states {decimal(need.states)}, models "
        f"{decimal(need.models)}), {decimal(need.end)} at the end."
    )


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 12 min, 3.5 h, 4 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
