"""`accelerate launch -m training --config RECIPE [field=value …]`: train one run.

Exit status: 0 finished, 1 diverged, 2 bad input, 130 interrupted (the same command resumes).
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from .config import TrainingConfig, load_config
from .loop import Interrupted, Progress, train


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
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        config = load_config(options.config, options.fields)
        record = _train_with_bar(config, console)
    except (ValueError, OSError, ImportError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("Interrupted before a step was done. Run the same command again to start.")
        return 130
    except Interrupted as interruption:
        console.print(
            f"{interruption} Run the same command again to go on.", markup=False, highlight=False
        )
        return 130
    if not PartialState().is_main_process:
        return 0
    if record["status"] == "diverged":
        console.print(
            f"{config.name} diverged: its loss was not finite at step {record['diverged_step']}.",
            style="red",
        )
        return 1
    print(
        f"{config.name}: validation loss {record['val_loss']:.4f} nats/token after {record['tokens']:,} tokens "
        f"({record['tokens_per_s']:,.0f} tokens/s); model in {config.folder / 'checkpoint'}"
    )
    return 0


def _train_with_bar(config: TrainingConfig, console: Console) -> dict[str, Any]:
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
    with (
        Bars(*columns, console=console, disable=others) as bars,
        _signals() as stop_asked,
    ):
        task = bars.add_task(config.name, total=1, state="starting", visible=False)

        def show(progress: Progress) -> None:
            state = f"loss {progress.loss:.3f}, {progress.tokens_per_s:,.0f} tokens/s"
            bars.update(
                task, completed=progress.step, total=progress.steps, state=state, visible=True
            )

        return train(config, show, stop_asked)


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Turn SIGINT and SIGTERM into a question that the loop asks between steps.

    Before the first step, and when it comes again, a signal interrupts at once.
    """
    asked: list[int] = []
    stepping = False

    def handle(number: int, frame: object) -> None:
        if asked or not stepping:
            raise KeyboardInterrupt
        asked.append(number)

    def stop_asked() -> bool:
        nonlocal stepping
        stepping = True
        return bool(asked)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop_asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
