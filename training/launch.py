"""A training in a process of its own, started so that it can be asked to save its state and stop.

`accelerate launch` hands on neither signals nor exit codes, and torchrun puts its processes into sessions of their own.
So the launcher ignores signals (what is ignored stays so over exec, and the training installs handlers of its own), the
process that holds the run's claim is asked, and what became of the run stands in its record.
"""

import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from .claims import CLAIMED, holder
from .config import TrainingConfig, save_config
from .loop import ended_record
from .record import read_record

ENDED = ("finished", "diverged")
# SIGUSR2: submitit's; a scheduler may send both of it and SIGTERM to all processes of a job.
IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def recipe_of(config: TrainingConfig) -> Path:
    """Write a run's recipe to OUT/recipes, for `--config`; return its path."""
    recipe = Path(config.out) / "recipes" / f"{config.name}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    save_config(config, recipe)
    return recipe


def start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a launcher, or a training, out of reach of the terminal's Ctrl-C."""

    def ignore() -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)

    return subprocess.Popen(command, start_new_session=True, preexec_fn=ignore)


def result(config: TrainingConfig) -> str:
    """Return what became of a run whose training has ended: finished, diverged, claimed elsewhere, or what failed."""
    if holder(config.folder) is not None:
        return CLAIMED
    try:
        ended = ended_record(config)
    except ValueError as error:  # another recipe's run, which the training has refused
        return f"ValueError: {error}"
    if ended:
        return str(ended["status"])
    record = read_record(config.folder) or {}
    if record.get("status") == "failed":
        return str(record.get("error"))
    return "the training ended without a result (see above); the next sweep goes on from its last state"


def stop(process: "subprocess.Popen[bytes]", folder: Path, patience_s: float | None = None) -> None:
    """Have the training below a process save its state and end; what is left after `patience_s` seconds is killed.

    A training that has not claimed its run has nothing to save and is killed at once. The process is left to its
    parent to be waited for: a signal handler may call this while the parent waits.
    """
    claimed = holder(folder)
    ours = [
        member
        for member in _family(process.pid)
        if claimed and (claimed.host, claimed.pid) == (socket.gethostname(), member.pid)
    ]
    for member in ours:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGUSR1)
    psutil.wait_procs(ours, timeout=patience_s)
    for member in _family(process.pid):
        with suppress(psutil.NoSuchProcess):
            member.kill()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
