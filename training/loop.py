"""One training run from recipe to run record: steps, log, states, evaluation.

Shapes: B rows of a micro-batch, T positions.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import hf_looped  # noqa: F401, registers the architecture

from .checkpoint import Counters, load_state, save_model, save_state
from .config import TrainingConfig, load_config, save_config
from .data import PackedData, check_tokens, prepare
from .hardware import check_launch, choose_attention, choose_orthogonalise_dtype, choose_precision
from .hyperp import learning_rates, parameter_groups, schedule
from .muonh import MuonH
from .packing import document_positions
from .record import architecture_of, describe, environment, read_record, write_record
from .sampler import rows_of_step
from .tokenizer import load_tokenizer

MICRO_BATCH_TOKENS = 16_384


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

    Returns the run record (as in run.json), with status "finished", or "diverged" where the loss stopped being finite.
    `on_progress` is called now and then, `stop_asked` after every step.

    Raises
    ------
    ValueError
        If the run's folder belongs to another recipe, the corpus is too small, or the recipe does not fit the launch.
    Interrupted
        If `stop_asked` said so; the state is saved.
    """
    check_launch()
    transformers_logging.disable_progress_bar()
    # Autocast is the loop's own: Accelerate keeps one precision for all runs of a process.
    accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())
    record = ended_record(config)
    if record is not None:
        return record
    if config.data.tokenizer is not None:
        architecture_of(
            config, load_tokenizer(config.data.tokenizer)
        )  # does it fit, before packing?
    with accelerator.main_process_first():
        packed = prepare(config.data, config.data_folder, progress=accelerator.is_main_process)
    run = _Run(config, accelerator, packed)
    try:
        record = run.finish(run.steps_to_the_end(on_progress, stop_asked))
    except Interrupted:
        raise
    except Exception as error:
        run.write("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        accelerator.free_memory()
    return record


def ended_record(config: TrainingConfig) -> dict[str, Any] | None:
    """Return the record of the run if it has finished or diverged before, else None.

    Raises ValueError if its folder holds a run with another recipe.
    """
    folder = config.folder
    if not (folder / "config.yaml").is_file():
        return None
    if replace(load_config(folder / "config.yaml"), out=config.out) != config:  # it may have moved
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
        architecture = architecture_of(config, packed.tokenizer)
        self.record = describe(config, architecture)
        check_tokens(packed, self.record["tokens"], config.data.allow_repeat)
        self.micro_rows = _micro_rows(config, accelerator.num_processes)
        attention, dtype = choose_attention(config), choose_orthogonalise_dtype(config)
        self.record |= environment() | {
            "corpus": config.data.corpus,
            "corpus_sources": json.dumps(packed.metadata["corpus"]["sources"]),
            "corpus_fingerprint": packed.metadata["corpus"]["fingerprint"],
            "data_fingerprint": packed.data_fingerprint,
            "val_fingerprint": packed.val_fingerprint,
            "precision": choose_precision(config),
            "attention": attention,
            "orthogonalise": str(dtype).removeprefix("torch."),
            "num_processes": accelerator.num_processes,
            "device": str(accelerator.device),
        }
        set_seed(config.seed)
        model = AutoModelForCausalLM.from_config(architecture, attn_implementation=attention)
        rates = learning_rates(
            config.optimizer,
            config.transfer,
            config.model,
            config.batch_tokens,
            self.record["tokens"],
        )
        optimizer = MuonH(
            parameter_groups(model, rates, config.optimizer), orthogonalise_dtype=dtype
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.bf16 = choose_precision(config) == "bf16"
        if accelerator.is_main_process:
            config.folder.mkdir(parents=True, exist_ok=True)
            save_config(config, config.folder / "config.yaml")
        accelerator.wait_for_everyone()
        self.counters = Counters()
        accelerator.register_for_checkpointing(self.counters)
        load_state(accelerator, config.folder / "state")
        self.write("running")

    def write(self, status: str, **further: Any) -> dict[str, Any]:
        """Write the record with a status and what is new."""
        self.record |= {"status": status, "wall_s": round(self.counters.wall_s, 3)} | further
        if self.accelerator.is_main_process:
            write_record(self.config.folder, self.record)
        return self.record

    def steps_to_the_end(
        self, on_progress: Callable[[Progress], None], stop_asked: Callable[[], bool]
    ) -> int | None:
        """Train to the last step. Return the step at which the loss stopped being finite, else None."""
        steps, config = self.record["steps"], self.config
        first, seconds = self.counters.step, self.counters.wall_s
        start = time.perf_counter()
        with _log(config.folder / "log.jsonl", first, self.accelerator.is_main_process) as log:
            for step in range(first, steps):
                loss = self._step(step)
                self.counters.step = step + 1
                self.counters.wall_s = seconds + time.perf_counter() - start
                if not math.isfinite(loss):
                    return step + 1
                last = step + 1 == steps
                if last or (step + 1) % config.log_every == 0:
                    speed = (step + 1) * config.batch_tokens / self.counters.wall_s
                    log(self._log_entry(step, loss, speed))
                    on_progress(Progress(step=step + 1, steps=steps, loss=loss, tokens_per_s=speed))
                asked = self._anyone(stop_asked())
                if last or asked or (step + 1) % config.checkpoint_every == 0:
                    save_state(self.accelerator, config.folder / "state", step + 1)
                if asked and not last:
                    raise Interrupted(
                        f"{config.name}: stopped after step {step + 1} of {steps}; its state is saved."
                    )
        return None

    def _step(self, step: int) -> float:
        """Take optimiser step `step`; return its mean loss over all processes, nats per token."""
        config, accelerator = self.config, self.accelerator
        factor = schedule(step, self.record["steps"], config.optimizer.final_lr_fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        rows = rows_of_step(step, config.batch_rows, len(self.packed.train), config.seed)
        share = len(rows) // accelerator.num_processes
        rows = rows[accelerator.process_index * share : (accelerator.process_index + 1) * share]
        parts = [
            rows[start : start + self.micro_rows] for start in range(0, share, self.micro_rows)
        ]
        self.model.train()
        self.optimizer.zero_grad()
        total = torch.zeros((), device=accelerator.device)
        for index, part in enumerate(parts):
            last = index + 1 == len(parts)
            with nullcontext() if last else accelerator.no_sync(self.model):
                loss = self._loss(self.model, self.packed.train[part]) / len(parts)
                accelerator.backward(loss)
            total += loss.detach()
        mean = accelerator.reduce(total, reduction="mean").item()
        if math.isfinite(mean):
            self.optimizer.step()
        return mean

    def _loss(self, model: torch.nn.Module, rows: NDArray[np.int32]) -> torch.Tensor:
        """Mean cross entropy of the next token over packed rows [B, T + 1], nats per token."""
        tokens = torch.as_tensor(rows, dtype=torch.long, device=self.accelerator.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        positions = None
        if self.config.data.separate_documents:
            positions = document_positions(inputs, self.packed.bos_token_id)
        device = self.accelerator.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16):
            return model(
                input_ids=inputs,
                shift_labels=targets,
                position_ids=positions,
                use_cache=False,
                skip_logits=True,
            ).loss

    def _log_entry(self, step: int, loss: float, tokens_per_s: float) -> dict[str, Any]:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        rates = {f"lr/{group['role']}": group["lr"] for group in self.optimizer.param_groups}
        return {
            "step": step + 1,
            "tokens": (step + 1) * self.config.batch_tokens,
            "loss": loss,
            "gradient_norm": torch.nn.utils.get_total_norm(gradients).item(),
            "tokens_per_s": round(tokens_per_s, 1),
        } | rates

    def _anyone(self, asked: bool) -> bool:
        """Whether any process was asked to stop, so that all stop after the same step."""
        if self.accelerator.num_processes == 1:
            return asked
        return bool(
            self.accelerator.reduce(
                torch.tensor(float(asked), device=self.accelerator.device)
            ).item()
        )

    def finish(self, diverged_at: int | None) -> dict[str, Any]:
        """Evaluate, save the model and close the record."""
        speed = self.counters.step * self.config.batch_tokens / max(self.counters.wall_s, 1e-9)
        if diverged_at is not None:
            return self.write("diverged", diverged_step=diverged_at, tokens_per_s=round(speed, 1))
        loss, tokens = self._evaluate()
        if not math.isfinite(loss):
            return self.write(
                "diverged", diverged_step=self.record["steps"], tokens_per_s=round(speed, 1)
            )
        if self.accelerator.is_main_process:
            model = self.accelerator.unwrap_model(self.model)
            save_model(model, self.packed.tokenizer, self.config.folder / "checkpoint")
        self.write("finished", val_loss=loss, val_tokens=tokens, tokens_per_s=round(speed, 1))
        if self.accelerator.is_main_process:
            shutil.rmtree(self.config.folder / "state", ignore_errors=True)
        return self.record

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, int]:
        """Mean loss over the whole validation split, nats per token, and the number of tokens scored."""
        rows, size = len(self.packed.validation), self.config.evaluation_rows
        # Not the wrapped model: its forward pass talks to other processes, which may have no batch left.
        model = self.accelerator.unwrap_model(self.model).eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        for start in range(rank * size, rows, world * size):
            batch = self.packed.validation[np.arange(start, min(start + size, rows))]
            tokens = len(batch) * self.config.data.sequence_length
            total += torch.tensor(
                [self._loss(model, batch).item() * tokens, tokens], dtype=torch.float64
            )
        nats, tokens = self.accelerator.reduce(total, reduction="sum").tolist()
        return nats / tokens, int(tokens)


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


@contextmanager
def _log(path: Path, first: int, write: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Append entries to a JSONL log; entries after the step that the run resumes from are dropped."""
    if not write:
        yield lambda entry: None
        return
    kept = path.read_text().splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in kept if line.endswith("\n") and json.loads(line)["step"] <= first]
    with path.open("w") as file:
        file.writelines(kept)

        def log(entry: dict[str, Any]) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        yield log
