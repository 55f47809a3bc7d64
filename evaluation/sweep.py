"""Score all finished checkpoints of a folder, or one model, keeping what was scored before.

Every result is written as soon as it is there: an interrupted command goes on where it stopped. With
several processes each scores a part of every task's documents.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from filelock import FileLock

from .command import table
from .lm import LoopedLM, processes
from .results import (
    Results,
    read_results,
    scored,
    with_losses,
    with_result,
    write_results,
)
from .run import load_task, run_task, settings_of
from .task import LoopedTask


class _Suite:
    """Tasks with their rows, loaded when they are first needed."""

    def __init__(self, data: Path, options: argparse.Namespace) -> None:
        self._settings: dict[str, dict[str, Any]] = {}
        self._data, self._options = data, options
        self._loaded: dict[str, LoopedTask] = {}

    def settings_of(self, name: str) -> dict[str, Any]:
        """Say once what a result of the task depends on beside the model."""
        if name not in self._settings:
            options = self._options
            self._settings[name] = settings_of(name, self._data, options.limit, options.mc_rule)
        return self._settings[name]

    def task(self, name: str) -> LoopedTask:
        """Load a task once."""
        if name not in self._loaded:
            self._loaded[name] = load_task(name, self._data, self._options.mc_rule)
        return self._loaded[name]


def score_runs(root: Path, tasks: Sequence[str], data: Path, options: argparse.Namespace) -> int:
    """Score what isn't yet of every finished run below `root`, then rebuild root/runs.csv."""
    state, suite = processes(), _Suite(data, options)
    records = sorted(root.glob("*/run.json"))
    if not records:
        raise ValueError(
            f"{root}: no */run.json found. Give the folder that holds the run directories."
        )
    plans, skipped = [], []
    for path in records:
        why = _unfit(path)
        if why is not None:
            skipped.append(f"{path.parent.name}: {why}")
            continue
        missing = _missing(
            read_results(_file(path)), _run_key(path, options), tasks, suite, options
        )
        plans.append((path, missing))
    state.wait_for_everyone()  # before a process writes what another one reads
    todo = [(path, missing) for path, missing in plans if missing]
    for line in skipped:
        _say(state, f"skipped {line}")
    _say(
        state,
        f"{len(plans) - len(todo)} of {len(plans)} finished runs were scored before, {len(todo)} to do",
    )
    for number, (path, missing) in enumerate(todo, start=1):
        _say(state, f"[{number}/{len(todo)}] {path.parent.name}: {len(missing)} tasks")
        key = _run_key(path, options)
        lm = _model(str(path.parent / "checkpoint"), options)
        _score(lm, missing, suite, _file(path), key, options, _own(path, options))
        _say(state, table(read_results(_file(path))["evaluations"][key]))
    if state.is_main_process:
        for path, _ in plans:
            if _own(path, options):
                _refresh(_file(path), _run_key(path, options), options.incomplete)
        from scaling.runs import collect_runs, write_table  # a second that the start needn't wait

        with FileLock(root / ".runs.csv.lock"):
            write_table(collect_runs(root), root / "runs.csv")
        _say(state, f"losses are in {root / 'runs.csv'}")
    state.wait_for_everyone()
    return 0


def _refresh(path: Path, key: str, incomplete: bool) -> None:
    """Set the flat losses of a run anew, which another `--incomplete` changes."""
    results = read_results(path)
    found = with_losses(results, key, incomplete=incomplete)
    if results and found != results:
        write_results(path, found)


def score_model(tasks: Sequence[str], data: Path, options: argparse.Namespace) -> int:
    """Score one model and print its losses; `--out` keeps them."""
    state, suite = processes(), _Suite(data, options)
    out = Path(options.out) if options.out else None
    results = read_results(out) if out else {}
    lm = _model(options.model, options)
    missing = _missing(results, lm.key, tasks, suite, options)
    state.wait_for_everyone()
    results = _score(lm, missing, suite, out, lm.key, options, True)
    if state.is_main_process:
        print(lm.key)
        print(table(results["evaluations"][lm.key]))
    return 0


def _unfit(path: Path) -> str | None:
    """Why a run cannot be scored, None when it can."""
    status = read_results(path).get("status") or "finished"  # as in the run table
    if status != "finished":
        return f"its status is {status}"
    if not (path.parent / "checkpoint" / "config.json").is_file():
        return "it has no checkpoint"
    return None


def _file(path: Path) -> Path:
    return path.with_name("evaluation.json")


def _own(path: Path, options: argparse.Namespace) -> bool:
    """Whether the run is scored at the recurrences that it was trained with."""
    trained = read_results(path).get("recurrences")
    return options.num_recurrences in (None, trained)


def _run_key(path: Path, options: argparse.Namespace) -> str:
    """Name a run's results by its checkpoint and the recurrences."""
    trained = read_results(path).get("recurrences")
    return f"checkpoint, r = {options.num_recurrences or trained}"


def _missing(
    results: Results, key: str, tasks: Sequence[str], suite: _Suite, options: argparse.Namespace
) -> list[str]:
    """Tasks without a result for this model and these settings."""
    asked = {"max_length": options.max_length} if options.max_length else {}
    asked |= {"dtype": options.dtype} if options.dtype != "auto" else {}
    return [
        name for name in tasks if not scored(results, key, name, suite.settings_of(name) | asked)
    ]


def _model(name: str, options: argparse.Namespace) -> LoopedLM:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its remarks on models passed ready made
    return LoopedLM(
        name,
        num_recurrences=options.num_recurrences,
        revision=options.revision,
        dtype=options.dtype,
        device=options.device,
        batch_size=options.batch_size,
        max_length=options.max_length,
        trust_remote_code=options.trust_remote_code,
        add_bos_token=not options.no_bos,
    )


def _score(
    lm: LoopedLM,
    tasks: Sequence[str],
    suite: _Suite,
    out: Path | None,
    key: str,
    options: argparse.Namespace,
    flat: bool,
) -> Results:
    """Score tasks one by one; the first process writes each result as it comes."""
    results = read_results(out) if out else {}
    for name in tasks:
        result = run_task(lm, suite.task(name), suite.settings_of(name))
        if result is None:
            continue
        results = with_result(results, key, name, result)
        if flat:
            results = with_losses(results, key, incomplete=options.incomplete)
        if out:
            write_results(out, results)
    return results


def _say(state: PartialState, text: str) -> None:
    if state.is_main_process:
        print(text, file=sys.stdout, flush=True)
