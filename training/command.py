"""`accelerate launch -m training --config RECIPE [field=value …]`: train one run.

Exit status: 0 finished, 1 diverged, 2 bad input or a full disk, 75 stopped by SIGTERM or SIGUSR1, 130 by Ctrl-C. After
75 and 130 the same command goes on from the saved state. It is the status of the training's own process; launchers end
with theirs.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from .config import TrainingConfig, load_config
from .loop import Interrupted, Progress, train
from .messages import say

RESUME = 75  # EX_TEMPFAIL: not done, try again
# Which environment variables say that a launcher started this process: Accelerate's and torchrun's.
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, train, and say what came out."""
    parser = argparse.ArgumentParser(
        prog="accelerate launch -m training",
        description="Train one looped (or unlooped) language model from a recipe.",
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="RECIPE",
        help="YAML file, e.g. training/recipes/nano.yaml",
    )
    parser.add_argument(
        "fields", nargs="*", metavar="field=value", help="override, e.g. model.recurrences=2"
    )
    parser.add_argument(
        "--report_to",
        metavar="TRACKER",
        help="tensorboard, wandb or trackio; the same as report_to=TRACKER",
    )
    options = parser.parse_args(arguments)
    if options.report_to is not None:
        options.fields.append(f"report_to={options.report_to}")
    console = Console(stderr=True)
    signals = Signals()
    try:
        with signals:
            config = load_config(options.config, options.fields)
            record = _train_with_bar(config, console, signals)
    except (ValueError, OSError, ImportError) as error:
        say(console, f"error: {error}", style="red")
        return 2
    except (KeyboardInterrupt, Interrupted) as interruption:
        what = str(interruption) or "Interrupted at once; what was saved before stays."
        say(console, f"{what} Run the same command again to go on.")
        return 130 if signals.asked == signal.SIGINT else RESUME
    if not PartialState().is_main_process:
        return 0
    if record["status"] == "diverged":
        say(
            console,
            f"{config.name} diverged at step {record['diverged_step']}: not finite: {record['not_finite']}.",
            style="red",
        )
        return 1
    print(
        f"{config.name}: validation loss {record['val_loss']:.4f} nats/token after {record['tokens']:,} tokens "
        f"({record['tokens_per_s']:,.0f} tokens/s); model in {config.folder / 'checkpoint'}"
    )
    return 0


def _train_with_bar(config: TrainingConfig, console: Console, signals: "Signals") -> dict[str, Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps, {task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Not Accelerate's state: asked before the run sets it up, it would take every process for the only one.
    others = os.environ.get("RANK", "0") != "0"
    with Bars(*columns, console=console, disable=others) as bars:
        task = bars.add_task(config.name, total=1, state="starting", visible=False)

        def show(progress: Progress) -> None:
            state = f"loss {progress.loss:.3f}, {progress.tokens_per_s:,.0f} tokens/s"
            bars.update(
                task, completed=progress.step, total=progress.steps, state=state, visible=True
            )

        return train(config, show, signals.stop_asked)


class Signals:
    """Turns SIGINT, SIGTERM and SIGUSR1 into a question that the loop asks between steps, while it is entered.

    Before the first step a signal interrupts at once, since there is nothing to save. So does a second SIGINT;
    schedulers send the others more than once, which must not break the saving. `asked` is the first signal that came.
    A launcher may die of a signal that it doesn't hand on: its death counts as SIGTERM.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        launched = any(name in os.environ for name in LAUNCHED)
        self._launcher = os.getppid() if launched else None
        self._stepping = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop_asked(self) -> bool:
        """Whether a signal has come; asked after every step."""
        self._stepping = True
        if self.asked is None and self._launcher not in (None, os.getppid()):
            self.asked = signal.SIGTERM
        return self.asked is not None

    def _handle(self, number: int, frame: object) -> None:
        again = self.asked is not None
        if not again:
            self.asked = number
        if not self._stepping or (again and number == signal.SIGINT):
            raise KeyboardInterrupt
