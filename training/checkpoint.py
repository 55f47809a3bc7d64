"""What a run leaves on disk: states to resume from, and the finished model with its tokenizer.

A state is a folder step-N: model.safetensors (weights by name), optimizer.safetensors (the optimiser's state of each
parameter, "name|field"), counters.json, and manifest.json with size and SHA-256 of the others. Tensors are whole, so a
state fits any number of processes, and nothing is unpickled. Random generators have no place in it: the loop seeds them
by seed, step and process.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .files import new_folder
from .parallel import gather, on_main_process, take

WEIGHTS, OPTIMIZER, COUNTERS = "model.safetensors", "optimizer.safetensors", "counters.json"
CONTENTS = (WEIGHTS, OPTIMIZER, COUNTERS)
MANIFEST = "manifest.json"


@dataclass(kw_only=True)
class Counters:
    """What the loop has done: finished steps, seconds of training, and the fingerprint of the rows it has read."""

    step: int = 0
    wall_s: float = 0.0
    data_fingerprint: str | None = None


def save_state(
    accelerator: Accelerator,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    counters: Counters,
    kept: int,
) -> None:
    """Write the state after `counters.step` steps to folder/step-N and keep the last `kept`. Called by all processes.

    Raises
    ------
    OSError
        If it can't be written (a full disk), in all processes; older states are as they were.
    """
    weights = gather(accelerator, model.named_parameters())
    states = gather(
        accelerator,
        (
            (f"{name}|{field}", value)
            for name, parameter in model.named_parameters()
            for field, value in optimizer.state[parameter].items()
        ),
    )

    def write() -> None:
        place = folder / f"step-{counters.step:09d}"
        try:
            with new_folder(place) as partial:
                save_file(weights, partial / WEIGHTS)
                save_file(states, partial / OPTIMIZER)
                (partial / COUNTERS).write_text(json.dumps(asdict(counters)))
                paths = [partial / name for name in CONTENTS]
                files = {
                    path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
                    for path in paths
                }
                (partial / MANIFEST).write_text(json.dumps(files, indent=1))
        except (OSError, SafetensorError) as error:
            older = _states(folder)
            left = f"The state {older[-1].name} is whole." if older else "There is no older state."
            raise OSError(
                f"{place}: the state after step {counters.step} can't be written ({error}). {left} Free disk space, "
                "then run the same command again to go on from there."
            ) from error
        there = _states(folder)
        now = there.index(place)
        # Later ones are damaged and were passed over: they must not push out whole ones.
        for old in there[: max(0, now + 1 - kept)] + there[now + 1 :]:
            shutil.rmtree(old, ignore_errors=True)

    on_main_process(accelerator, write)


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    warn: Callable[[str], None] = lambda message: None,
) -> Counters:
    """Load the latest whole state; fresh counters if there is none. Damaged ones are named by `warn` and passed over.

    Raises
    ------
    ValueError
        If there are states but none is whole, or they are of another model.
    """
    states = _states(folder)
    for place in reversed(states):
        damage = _damage(place)
        if damage is None:
            _load(place, model, optimizer)
            return Counters(**json.loads((place / COUNTERS).read_text()))
        warn(f"{damage}; the state before it is used.")
    if states:
        raise ValueError(
            f"{folder} holds {len(states)} state(s), none of them whole ({damage}). Restore one from a copy, or delete "
            "the folder to train from the start."
        )
    return Counters()


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    place: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write a folder that `from_pretrained` loads; `weights` are used instead of the model's, if it is sharded."""
    with new_folder(place) as partial:
        model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)


def _states(folder: Path) -> list[Path]:
    return sorted(place for place in folder.glob("step-*") if not place.name.endswith(".partial"))


def _damage(place: Path) -> str | None:
    """Say which file of a state is not as it was written, None if all are."""
    try:
        files = json.loads((place / MANIFEST).read_text())
        written = {name: (files[name]["bytes"], files[name]["sha256"]) for name in CONTENTS}
    except (OSError, ValueError, TypeError, LookupError) as error:
        return f"{place / MANIFEST} can't be read ({type(error).__name__}: {error})"
    for name, (size, sha256) in written.items():
        path = place / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            said = "is missing" if found is None else f"has {found:,} bytes"
            return f"{path} {said}, written were {size:,}"
        if _sha256(path) != sha256:
            return f"{path} is not what was written (its SHA-256 differs)"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@torch.no_grad()
def _load(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    with safe_open(place / WEIGHTS, "pt") as file:
        if set(file.keys()) != set(parameters):
            raise ValueError(
                f"{place} is the state of another model: {sorted(set(file.keys()) ^ set(parameters))[0]} is in one of "
                "them only. Delete the run's folder to train from the start."
            )
        for name, parameter in parameters.items():
            parameter.copy_(take(parameter, file.get_tensor(name)))
    with safe_open(place / OPTIMIZER, "pt") as file:
        for key in file.keys():
            name, field = key.rsplit("|", 1)
            value, parameter = file.get_tensor(key), parameters[name]
            whole_shape = value.shape == parameter.shape
            optimizer.state[parameter][field] = (
                take(parameter, value) if whole_shape else value.to(parameter.device)
            )
