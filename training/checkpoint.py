"""What a run leaves on disk: states to resume from, and the finished model with its tokenizer.

Both are written beside their place and renamed, so that what is there is whole. States are
Accelerate's (weights, optimiser, random generators, the loop's counters).
"""

import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Counters:
    """What the loop has done, kept with the state: finished steps and seconds of training."""

    def __init__(self) -> None:
        self.step = 0
        self.wall_s = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        return {"step": self.step, "wall_s": self.wall_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take counters from `state_dict`."""
        self.step, self.wall_s = state["step"], state["wall_s"]


def save_state(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Write the state after `step` steps to folder/step-N and drop older ones. Called by all processes."""
    place = folder / f"step-{step:09d}"
    partial = folder / f"{place.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(place, ignore_errors=True)
        os.replace(partial, place)
        for older in folder.glob("step-*"):
            if older != place:
                shutil.rmtree(older, ignore_errors=True)
    accelerator.wait_for_everyone()


def load_state(accelerator: Accelerator, folder: Path) -> bool:
    """Load the latest whole state into what the accelerator has prepared; False if there is none."""
    places = sorted(place for place in folder.glob("step-*") if not place.name.endswith(".partial"))
    if not places:
        return False
    accelerator.load_state(str(places[-1]))
    return True


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, place: Path) -> None:
    """Write model and tokenizer to a folder that `from_pretrained` loads."""
    partial = place.with_name(place.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(place, ignore_errors=True)
    os.replace(partial, place)
