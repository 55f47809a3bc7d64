"""Experiment trackers: what a run logs goes to TensorBoard, Weights & Biases or Trackio too.

Accelerate's tracker objects are made here one by one, not by `Accelerator(log_with=…)`: its `end_training` takes the
process group down, and the next run of the process needs it.

TensorBoard writes into the run's folder (`tensorboard --logdir runs`). W&B and Trackio take WANDB_PROJECT and
TRACKIO_PROJECT as the project's name (default "hf-looped"), and W&B its other variables: without network set
WANDB_MODE=offline (upload later: `wandb sync RUN_FOLDER/wandb/offline-*`). Without a login W&B asks for one at a
terminal and gives up after WANDB_LOGIN_TIMEOUT seconds (30); elsewhere it gives up at once.
"""

import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from .files import write_text

logger = logging.getLogger(__name__)


def check_tracker(name: str) -> None:
    """Raise a ValueError if `report_to` names a tracker whose package is not installed; "none" always passes."""
    if name == "none":
        return
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a mere folder of that name, as W&B makes one
        raise ValueError(
            f"report_to is {name!r}, but the package {name} is not installed. Run `pip install {name}` (the extra "
            "`trackers` has all of them), or set report_to=none."
        )


class Trackers:
    """The tracker of one run, or none; whatever it raises is said once and ends the tracking, never the training.

    Parameters
    ----------
    name
        `report_to` of the recipe, which `check_tracker` has passed, or "none": processes other than the main one.
    folder, run_id
        The run's folder and name. What identifies the run to W&B and Trackio lies in the folder (tracker_id): a
        resumed run goes on where it was, one that was deleted and made anew is another.
    settings
        Hyperparameters, recipe and record; nested ones get names with dots, None and lists become text.
    step
        Finished steps of the state that the run resumes from. Later ones are done again: TensorBoard drops what it has
        of them, W&B keeps the first entry of a step, Trackio both.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        run_id: str,
        settings: Mapping[str, Any],
        step: int = 0,
    ) -> None:
        self.name = name
        self.tracker: GeneralTracker | None = None
        if name != "none":
            self._safely("starting", lambda: self._start(folder, run_id, settings, step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log the numbers among `values` after `step` steps."""
        tracker = self.tracker
        if tracker is None:
            return
        numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
        numbers.pop("step", None)  # Trackio keeps that name for itself
        self._safely("logging", lambda: tracker.log(numbers, step=step))

    def close(self) -> None:
        """Write what is left and end the tracking; for finished, failed and interrupted runs."""
        tracker, self.tracker = self.tracker, None
        if tracker is not None:
            self._safely("closing", tracker.finish)

    def _start(self, folder: Path, run_id: str, settings: Mapping[str, Any], step: int) -> None:
        tracker = _tracker(self.name, folder, run_id, step)
        tracker.start()
        self.tracker = tracker
        # TensorBoard would show settings that are stored again as another run.
        if not any((folder / "tensorboard").glob("*/hparams.yml")):
            tracker.store_init_configuration(_flat(settings))

    def _safely(self, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            reason = " ".join(str(error).split())
            logger.warning(
                "%s: %s failed (%s: %s); the run goes on without it.",
                *(self.name, doing, type(error).__name__, reason),
            )
            tracker, self.tracker = self.tracker, None
            if tracker is not None:
                with suppress(Exception):  # the next run of this process must not find it open
                    tracker.finish()


def _tracker(name: str, folder: Path, run_id: str, step: int) -> GeneralTracker:
    """Make Accelerate's tracker of that name, not started."""
    if name == "tensorboard":
        return TensorBoardTracker("tensorboard", folder, purge_step=step + 1)
    project = os.environ.get(f"{name.upper()}_PROJECT", "hf-looped")
    identity = _identity(folder, run_id)
    if name == "trackio":
        return TrackioTracker(project, name=identity, resume="allow")
    os.environ.setdefault("WANDB_LOGIN_TIMEOUT", "30")
    place = os.environ.get("WANDB_DIR", str(folder))
    return WandBTracker(project, id=identity, name=run_id, resume="allow", dir=place)


def _identity(folder: Path, run_id: str) -> str:
    """Name of the run among all runs of a project, made once and kept in its folder."""
    place = folder / "tracker_id"
    if not place.is_file():
        allowed = re.sub(r"[\\#?%:]", "-", run_id)  # W&B refuses these in an id
        write_text(place, f"{allowed[:100]}-{uuid.uuid4().hex[:8]}")
    return place.read_text()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as numbers and text under names with dots."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            flat[f"{prefix}{name}"] = value if plain else str(value)
    return flat
