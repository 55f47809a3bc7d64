"""Runs as jobs of a cluster, one job a run, through submitit (`pip install -e .[slurm]`).

A job that its scheduler preempts, or that meets its time limit, has the training save its state and is queued again by
submitit; the next job goes on from there. The training itself claims the run, so jobs and sweeps may share a folder.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .claims import CLAIMED
from .config import TrainingConfig
from .grid import PlannedRun
from .launch import ENDED, recipe_of, result, start, stop
from .ledger import write_runs

TIME_OUTS = 100  # times that a job may meet its limit; each adds at least a step
SIGNAL_DELAY_S = {
    "slurm": 90,
    "local": 30,
}  # between the scheduler's signal and the end, submitit's
SIGNAL_WAIT_S = 10


class TrainingJob:
    """Trains a run in a job of its own; called by submitit, and asked for a `checkpoint` when the job must end."""

    def __init__(self, config: TrainingConfig, patience_s: float) -> None:
        self.config, self.patience_s = config, patience_s

    def __call__(self) -> str:
        """Train, rebuild runs.csv, and return what became of the run.

        Raises RuntimeError with the reason if it has no result. Before that it waits a little: where a scheduler
        signals all processes, the training may have ended before submitit asks for the checkpoint.
        """
        self.process = start(_command(recipe_of(self.config)))
        self.process.wait()
        write_runs(Path(self.config.out))
        outcome = result(self.config)
        if outcome in (*ENDED, CLAIMED):
            return outcome
        time.sleep(SIGNAL_WAIT_S)
        raise RuntimeError(f"{self.config.name}: {outcome}")

    def checkpoint(self) -> Any:
        """Have the training save its state and end; return what submitit queues again."""
        from submitit.helpers import DelayedSubmission

        stop(self.process, self.config.folder, self.patience_s)
        return DelayedSubmission(TrainingJob(self.config, self.patience_s))


def _command(recipe: Path) -> list[str]:
    """Command of a training on the GPUs that the job sees, or on its CPUs in one process."""
    training = ["-m", "training", "--config", str(recipe)]
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return [sys.executable, *training]
    launch = ["-m", "accelerate.commands.launch", "--num_processes", str(gpus)]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    if gpus > 1:  # port 0: any free one, as several jobs may share a node
        launch += ["--multi_gpu", "--main_process_port", "0"]
    return [sys.executable, *launch, *training]


def submit(
    runs: Sequence[PlannedRun], out: Path, cluster: str, settings: Sequence[str]
) -> list[Any]:
    """Submit one job a run, longest first as given, to "slurm" or (all at once, to try it) "local"; return the jobs.

    `settings` are key=value parameters of submitit's AutoExecutor: timeout_min, gpus_per_node, slurm_partition, … Logs
    go to out/jobs.

    Raises
    ------
    ValueError
        If submitit is missing, the cluster is not there, or a setting is missing, unknown or of more than one node.
    """
    parameters = read_settings(settings)
    try:
        import submitit
    except ImportError as error:
        raise ValueError(
            "--submit needs submitit, which is not installed: pip install -e .[slurm]"
        ) from error
    delay = SIGNAL_DELAY_S[cluster]
    if cluster == "slurm":
        delay = parameters.get("slurm_signal_delay_s", delay)
    try:
        executor = submitit.AutoExecutor(
            folder=out / "jobs",
            cluster=cluster,
            slurm_max_num_timeout=TIME_OUTS,
            local_max_num_timeout=TIME_OUTS,
        )
        executor.update_parameters(**parameters)
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"--submit {cluster}: {error}") from error
    jobs = []
    for run in runs:
        executor.update_parameters(name=run.config.name)
        jobs.append(executor.submit(TrainingJob(run.config, 0.8 * delay)))
    return jobs


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse key=value settings of the executor; values as in YAML.

    >>> read_settings(["timeout_min=60", "slurm_partition=long"])
    {'timeout_min': 60, 'slurm_partition': 'long'}
    """
    for setting in settings:
        if "=" not in setting:
            raise ValueError(f"--slurm {setting!r} is not of the form key=value.")
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    except OmegaConfBaseException as error:
        raise ValueError(f"--slurm: {str(error).splitlines()[0]}") from error
    assert isinstance(read, dict)
    parameters = {str(name): value for name, value in read.items()}
    if not {"timeout_min", "slurm_time"} & parameters.keys():
        raise ValueError(
            "--slurm timeout_min is missing: give a job's limit in minutes. A run that takes longer goes on in the "
            "next job."
        )
    for name in ("nodes", "tasks_per_node", "slurm_ntasks_per_node"):
        if parameters.get(name, 1) != 1:
            raise ValueError(
                f"--slurm {name} is {parameters[name]}: a run is one task on one node, which starts a process for each "
                "of its GPUs. Leave it out and set gpus_per_node."
            )
    return parameters
