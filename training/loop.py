"""One training run from recipe to run record: steps, log, states, evaluation.

Everything that a step depends on is a function of the recipe and the step's number (rows, rates, random numbers) or in
the state (weights, optimiser), so that a run that was killed ends with the bits of one that was not.

Shapes: B rows of a micro-batch, T positions.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from numpy.typing import NDArray
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from hf_looped.modeling_looped import LoopedCausalLMOutput

from .checkpoint import load_state, save_model, save_state
from .claims import claim
from .config import TrainingConfig, load_config, save_config
from .data import PackedData, check_tokens, prepare
from .files import naming_a_full_disk
from .hardware import check_launch, choose_attention, choose_orthogonalise_dtype, choose_precision
from .hyperp import learning_rates, parameter_groups, schedule
from .initial import initial_model
from .log import open_log
from .messages import say
from .monitor import gradient_norms, state_norms
from .muonh import MuonH
from .packing import document_positions
from .parallel import accumulating, any_process, gather, on_main_process, shard
from .record import architecture_of, describe, environment, read_record, write_record
from .sampler import rows_of_step
from .samples import write_samples
from .tokenizer import load_tokenizer
from .trackers import Trackers, check_tracker
from .trajectories import Trajectory, trajectory

MICRO_BATCH_TOKENS = 16_384
# Fields that change no number of a run: they may differ when it is started again.
FREE = ("out", "checkpoint_every", "checkpoints_kept", "report_to", "samples")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands: finished steps, the last loss in nats per token, and speed in tokens per second."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float


class Interrupted(Exception):
    """The run was asked to stop; its state is saved, and the same command resumes it."""


def train(
    config: TrainingConfig,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train, evaluate and record one run; a finished one is returned as it is, a half-finished one resumed.

    Returns the run record (as in run.json), with status "finished", or "diverged" where the loss or a gradient stopped
    being finite. `on_progress` is called now and then, `stop_asked` after every step.

    Raises
    ------
    ValueError
        If the run's folder belongs to another recipe, the corpus is too small, or the recipe does not fit the launch.
    ClaimedElsewhere
        If another process trains this run now.
    OSError
        If the disk is full; the states that were saved are as they were.
    Interrupted
        If `stop_asked` said so; the state is saved.
    """
    check_launch()
    check_tracker(config.report_to)
    transformers_logging.disable_progress_bar()
    # Autocast is the loop's own: Accelerate keeps one precision for all runs of a process.
    accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())
    record = ended_record(config)
    if record is not None:
        return record
    if config.data.tokenizer is not None:  # does it fit, before anything is written?
        architecture_of(config, load_tokenizer(config.data.tokenizer))
    with ExitStack() as stack:
        stack.enter_context(naming_a_full_disk(config.folder))
        on_main_process(accelerator, lambda: stack.enter_context(claim(config.folder)))
        return _train(config, accelerator, on_progress, stop_asked)


def _train(
    config: TrainingConfig,
    accelerator: Accelerator,
    on_progress: Callable[[Progress], None],
    stop_asked: Callable[[], bool],
) -> dict[str, Any]:
    record = ended_record(config)  # again: it may have ended while the claim was waited for
    if record is not None:
        return record
    # Whoever comes first makes the data, and the others wait for its lock: a barrier would time out.
    packed = prepare(config.data, config.data_folder)
    run = _Run(config, accelerator, packed)
    tracker = config.report_to if accelerator.is_main_process else "none"
    settings = asdict(config) | run.record
    try:
        with Trackers(tracker, config.folder, config.name, settings, run.counters.step) as trackers:
            record = run.finish(run.steps_to_the_end(trackers, on_progress, stop_asked))
            trackers.log({"val_loss": record.get("val_loss")}, run.counters.step)
    except Interrupted:
        raise
    except Exception as error:
        # Another process may have been killed, which is no failure of the run: it goes on from its state.
        if accelerator.num_processes == 1 or not isinstance(error, RuntimeError):
            with suppress(OSError):  # the disk may be full, and the error says so
                run.write("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        accelerator.free_memory()
    return record


def ended_record(config: TrainingConfig) -> dict[str, Any] | None:
    """Return the record of the run if it has finished or diverged before, else None.

    Raises ValueError if its folder holds a run with another recipe; what changes no number (`FREE`) may differ.
    """
    folder = config.folder
    if not (folder / "config.yaml").is_file():
        return None
    free = {name: getattr(config, name) for name in FREE}
    if replace(load_config(folder / "config.yaml"), **free) != config:
        raise ValueError(
            f"{folder} holds a run with another recipe (compare its config.yaml with yours). Give another run_id or "
            "out, or delete the folder."
        )
    record = read_record(folder)
    ended = record is not None and record["status"] in ("finished", "diverged")
    return record if ended else None


class _Run:
    """Model, optimiser and data of one run, and its steps."""

    def __init__(
        self, config: TrainingConfig, accelerator: Accelerator, packed: PackedData
    ) -> None:
        self.config, self.accelerator, self.packed = config, accelerator, packed
        self.architecture = architecture_of(config, packed.tokenizer)
        self.record = describe(config, self.architecture)
        check_tokens(packed, self.record["tokens"], config.data.allow_repeat)
        self.micro_rows = _micro_rows(config, accelerator.num_processes)
        self.sharded = config.sharding == "fsdp2" and accelerator.num_processes > 1
        attention, dtype = choose_attention(config), choose_orthogonalise_dtype(config)
        precision = choose_precision(config)
        self.bf16 = precision == "bf16"
        self.record |= environment() | {
            "corpus": config.data.corpus,
            "corpus_sources": json.dumps(packed.metadata["corpus"]["sources"]),
            "corpus_fingerprint": packed.metadata["corpus"]["fingerprint"],
            "data_fingerprint": packed.data_fingerprint,
            "val_fingerprint": packed.val_fingerprint,
            "precision": precision,
            "attention": attention,
            "orthogonalise": str(dtype).removeprefix("torch."),
            "num_processes": accelerator.num_processes,
            "device": str(accelerator.device),
        }
        set_seed(config.seed)
        model = initial_model(self.architecture, config.init_from, attention)
        if config.compile:
            model.compile()
        self.model = shard(model, accelerator) if self.sharded else accelerator.prepare(model)
        # The same weights under their own names; its forward pass does not talk to other processes, unless sharded.
        self.unwrapped = accelerator.unwrap_model(self.model)
        rates = learning_rates(
            config.optimizer,
            config.transfer,
            self.architecture,
            config.batch_tokens,
            self.record["tokens"],
        )
        self.optimizer = MuonH(
            parameter_groups(self.unwrapped, rates, config.optimizer), orthogonalise_dtype=dtype
        )
        on_main_process(accelerator, self._open_folder)
        self.counters = load_state(
            config.folder / "state", self.unwrapped, self.optimizer, warn=self._warn
        )
        self._check_rows()
        self.write("running")

    def _check_rows(self) -> None:
        """Refuse to go on with other rows than those the state was trained on."""
        state, rows = self.counters.data_fingerprint, self.packed.data_fingerprint
        if self.counters.step and state != rows:
            raise ValueError(
                f"{self.config.folder}: its state after step {self.counters.step} was trained on other rows "
                f"(data_fingerprint {str(state)[:12]}) than {self.packed.folder} holds now ({rows[:12]}). Restore the "
                "data, or delete the run's folder to train from the start."
            )
        self.counters.data_fingerprint = rows

    def _open_folder(self) -> None:
        self.config.folder.mkdir(parents=True, exist_ok=True)
        save_config(self.config, self.config.folder / "config.yaml")

    def _warn(self, message: str) -> None:
        if self.accelerator.is_main_process:
            say(Console(stderr=True), f"warning: {message}", style="yellow")

    def write(self, status: str, **further: Any) -> dict[str, Any]:
        """Write the record with a status and what is new."""
        self.record |= {"status": status, "wall_s": round(self.counters.wall_s, 3)} | further
        if self.accelerator.is_main_process:
            write_record(self.config.folder, self.record)
        return self.record

    def steps_to_the_end(
        self,
        trackers: Trackers,
        on_progress: Callable[[Progress], None],
        stop_asked: Callable[[], bool],
    ) -> str | None:
        """Train to the last step. Return what stopped being finite, None if nothing did."""
        config, counters, steps = self.config, self.counters, self.record["steps"]
        seconds, start = counters.wall_s, time.perf_counter()
        main = self.accelerator.is_main_process
        with open_log(config.folder, counters.step, config.log_every, main, self._warn) as log:
            for step in range(counters.step, steps):
                last = step + 1 == steps
                logged = last or (step + 1) % config.log_every == 0
                loss, gradients, states = self._step(step, watch=logged)
                counters.step = step + 1
                counters.wall_s = seconds + time.perf_counter() - start
                if bad := _not_finite(loss, gradients):
                    return bad
                if logged:
                    entry, timing = self._log_entry(loss, gradients | states), self._timing()
                    log.write(entry, timing)
                    trackers.log(entry | timing, step + 1)
                    speed = timing["tokens_per_s"]
                    on_progress(Progress(step=step + 1, steps=steps, loss=loss, tokens_per_s=speed))
                asked = any_process(self.accelerator, stop_asked())
                if last or asked or (step + 1) % config.checkpoint_every == 0:
                    log.sync()
                    self._save_state()
                if asked and not last:
                    raise Interrupted(
                        f"{config.name}: stopped after step {step + 1} of {steps}; its state is saved."
                    )
        return None

    def _save_state(self) -> None:
        save_state(
            self.accelerator,
            self.config.folder / "state",
            self.unwrapped,
            self.optimizer,
            self.counters,
            self.config.checkpoints_kept,
        )

    def _step(self, step: int, watch: bool) -> tuple[float, dict[str, float], dict[str, float]]:
        """Take optimiser step `step`, unless its loss or a gradient is not finite.

        Return the mean loss over all processes, nats per token, the norms of gradients and, if `watch`, those of the
        states between recurrences in this process' last micro-batch.
        """
        config, accelerator = self.config, self.accelerator
        _seed(config.seed, step, accelerator.process_index)
        factor = schedule(step, self.record["steps"], config.optimizer.final_lr_fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        rows = rows_of_step(step, config.batch_rows, len(self.packed.train), config.seed)
        share = len(rows) // accelerator.num_processes
        rows = rows[accelerator.process_index * share : (accelerator.process_index + 1) * share]
        parts = [
            rows[start : start + self.micro_rows] for start in range(0, share, self.micro_rows)
        ]
        drawn = trajectory(config, self.architecture, step)
        self.model.train()
        self.optimizer.zero_grad()
        total = torch.zeros((), device=accelerator.device)
        for index, part in enumerate(parts):
            last = index + 1 == len(parts)
            with accumulating(self.model, accelerator, last):
                rows_read = self.packed.train[part]
                loss, states = self._forward(self.model, rows_read, drawn, watch and last)
                accelerator.backward(loss / len(parts))
            total += loss.detach() / len(parts)
        mean = accelerator.reduce(total, reduction="mean").item()
        gradients = gradient_norms(self.unwrapped)
        if not _not_finite(mean, gradients):
            self.optimizer.step()
        return mean, gradients, state_norms(states) if watch else {}

    def _forward(
        self,
        model: torch.nn.Module,
        rows: NDArray[np.int32],
        drawn: Trajectory | None = None,
        output_recurrent_states: bool = False,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Mean loss over packed rows [B, T + 1], nats per token, and wanted states.

        In eval mode the loss is the cross entropy of the next token; in training that of the model's objective.
        """
        tokens = torch.as_tensor(rows, dtype=torch.long, device=self.accelerator.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        positions = None
        if self.config.data.separate_documents:
            positions = document_positions(inputs, self.packed.bos_token_id)
        device = self.accelerator.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16):
            output: LoopedCausalLMOutput = model(
                input_ids=inputs,
                shift_labels=targets,
                position_ids=positions,
                use_cache=False,
                skip_logits=True,
                output_recurrent_states=output_recurrent_states,
                **(drawn.arguments() if drawn else {}),
            )
        assert output.loss is not None
        return output.loss, output.recurrent_states or ()

    def _log_entry(self, loss: float, norms: dict[str, float]) -> dict[str, Any]:
        step = self.counters.step
        rates = {f"lr/{group['role']}": group["lr"] for group in self.optimizer.param_groups}
        tokens = step * self.config.batch_tokens
        return {"step": step, "tokens": tokens, "loss": loss} | norms | rates

    def _timing(self) -> dict[str, Any]:
        step, seconds = self.counters.step, self.counters.wall_s
        speed = step * self.config.batch_tokens / max(seconds, 1e-9)
        return {"step": step, "wall_s": round(seconds, 3), "tokens_per_s": round(speed, 1)}

    def finish(self, not_finite: str | None) -> dict[str, Any]:
        """Evaluate, save the model and close the record."""
        config, main = self.config, self.accelerator.is_main_process
        speed = {"tokens_per_s": self._timing()["tokens_per_s"]}
        if not_finite is None:
            loss, tokens = self._evaluate()
            not_finite = None if math.isfinite(loss) else "validation loss"
        if not_finite is not None:
            step = self.counters.step
            return self.write("diverged", diverged_step=step, not_finite=not_finite, **speed)
        weights = None
        if self.sharded:
            weights = gather(self.accelerator, self.unwrapped.named_parameters())
        on_main_process(self.accelerator, lambda: self._save_model(weights))
        self.write("finished", val_loss=loss, val_tokens=tokens, **speed)
        if main:
            shutil.rmtree(config.folder / "state", ignore_errors=True)
        return self.record

    def _save_model(self, weights: dict[str, torch.Tensor] | None) -> None:
        folder, model = self.config.folder, self.unwrapped
        if (
            weights is not None
        ):  # fully_shard changes the model's class, whose name the config takes
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self.architecture)
        save_model(model, self.packed.tokenizer, folder / "checkpoint", weights)
        if self.config.samples:
            saved = AutoModelForCausalLM.from_pretrained(folder / "checkpoint")
            rows = self.packed.validation[
                np.arange(min(self.config.samples, len(self.packed.validation)))
            ]
            write_samples(
                saved.to(self.accelerator.device),
                self.packed.tokenizer,
                rows,
                folder / "samples.md",
            )

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, int]:
        """Mean loss over the whole validation split, nats per token, and the number of tokens scored."""
        validation, size = self.packed.validation, self.config.evaluation_rows
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        model = self.unwrapped.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        for first in range(0, len(validation), world * size):
            start = first + rank * size
            mine = start < len(validation)
            # All processes must pass through a sharded model equally often: one without rows left repeats the first.
            start = start if mine else 0
            batch = validation[np.arange(start, min(start + size, len(validation)))]
            tokens = len(batch) * self.config.data.sequence_length if mine else 0
            total += torch.tensor(
                [self._forward(model, batch)[0].item() * tokens, tokens], dtype=torch.float64
            ).to(total.device)
        nats, tokens = self.accelerator.reduce(total, reduction="sum").tolist()
        return nats / tokens, int(tokens)


def _not_finite(loss: float, gradients: dict[str, float]) -> str:
    """Name what is not finite; empty if all is well."""
    values = {"loss": loss, **gradients}
    return ", ".join(name for name, value in values.items() if not math.isfinite(value))


def _seed(seed: int, step: int, process: int) -> None:
    """Seed the random numbers of a step (noise of the initial state, dropout), so that no generator's state is kept."""
    words = np.random.SeedSequence((seed, step, process)).generate_state(1, np.uint64)
    torch.manual_seed(int(words[0]))


def _micro_rows(config: TrainingConfig, processes: int) -> int:
    """Rows of one forward pass on one process."""
    if config.batch_rows % processes:
        raise ValueError(
            f"batch_tokens is {config.batch_tokens}, {config.batch_rows} rows: they don't divide among {processes} "
            "processes. Change batch_tokens or the number of processes."
        )
    share = config.batch_rows // processes
    if config.micro_batch_rows is not None:
        if share % config.micro_batch_rows:
            raise ValueError(
                f"micro_batch_rows is {config.micro_batch_rows}: it must divide the {share} rows of a process's batch."
            )
        return config.micro_batch_rows
    most = max(1, MICRO_BATCH_TOKENS // config.data.sequence_length)
    return max(rows for rows in range(1, min(share, most) + 1) if share % rows == 0)
