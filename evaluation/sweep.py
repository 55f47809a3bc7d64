"""Score all finished checkpoints of a folder, or one model, keeping what was scored before.

Every result is written as soon as it is there: an interrupted command goes on where it stopped. With
several processes each scores a part of every task's documents.
"""

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import PartialState
from filelock import FileLock

from .lm import LoopedLM, folder_sha256, processes
from .results import (
    Results,
    read_results,
    scored,
    table,
    with_losses,
    with_result,
    write_results,
)
from .run import load_task, run_task, settings_of
from .task import LoopedTask


@dataclass(frozen=True, kw_only=True)
class _Suite:
    """Wanted tasks: what their results depend on beside the model, and how to load them once."""

    settings: Mapping[str, Mapping[str, Any]]
    load: Callable[[str], LoopedTask]

    def missing(self, results: Results, key: str, weights: str | None) -> list[str]:
        """Tasks without a result for this model and these settings."""
        return [
            name
            for name, settings in self.settings.items()
            if not scored(results, key, name, {**settings, "weights": weights})
        ]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A finished run: its folder, the key of its results, and whether r is the one it was trained with."""

    folder: Path
    key: str
    own: bool

    @property
    def file(self) -> Path:
        """Where its results are."""
        return self.folder / "evaluation.json"


def score_runs(root: Path, tasks: Sequence[str], data: Path, options: argparse.Namespace) -> int:
    """Score what isn't yet of every finished run below `root`, then rebuild root/runs.csv."""
    # A second that `--model` needn't wait for.
    from scaling.runs import collect_runs, read_object, status_of, write_table

    state, suite = processes(), _suite(tasks, data, options)
    records = {path.parent: read_object(path) for path in sorted(root.glob("*/run.json"))}
    if not records:
        raise ValueError(
            f"{root}: no */run.json found. Give the folder that holds the run directories."
        )
    runs = []
    for folder, record in records.items():
        if status_of(record) != "finished":
            _say(state, f"skipped {folder.name}: its status is {status_of(record)}")
        elif not (folder / "checkpoint" / "config.json").is_file():
            _say(state, f"skipped {folder.name}: it has no checkpoint")
        else:
            trained = record.get("recurrences")
            r = options.num_recurrences or trained
            runs.append(_Run(folder=folder, key=f"checkpoint, r = {r}", own=r == trained))
    missing = [
        suite.missing(read_results(run.file), run.key, folder_sha256(run.folder / "checkpoint"))
        for run in runs
    ]
    state.wait_for_everyone()  # before a process writes what another one reads
    todo = [(run, names) for run, names in zip(runs, missing, strict=True) if names]
    _say(
        state,
        f"{len(runs) - len(todo)} of {len(runs)} finished runs were scored before, {len(todo)} to do",
    )
    failed = 0
    for number, (run, names) in enumerate(todo, start=1):
        _say(state, f"[{number}/{len(todo)}] {run.folder.name}: {len(names)} tasks")
        try:  # the other runs are still to be scored; every process fails alike
            lm = _model(str(run.folder / "checkpoint"), options)
            _score(lm, names, suite, run.file, run.key, options, flat=run.own)
        except ValueError as error:
            failed += 1
            _say(state, f"failed: {error}")
    if state.is_main_process:
        for run in runs:
            if run.own:
                _refresh(run, options.incomplete)
        with FileLock(root / ".runs.csv.lock"):
            write_table(collect_runs(root), root / "runs.csv")
        _say(state, f"losses are in {root / 'runs.csv'}")
        if failed:
            _say(state, f"{failed} of {len(todo)} runs could not be scored (see above)")
    state.wait_for_everyone()
    return 1 if failed else 0


def score_model(tasks: Sequence[str], data: Path, options: argparse.Namespace) -> int:
    """Score one model and print its losses; `--out` keeps them."""
    state, suite = processes(), _suite(tasks, data, options)
    out = Path(options.out) if options.out else None
    lm = _model(options.model, options)
    missing = suite.missing(read_results(out) if out else {}, lm.key, lm.weights)
    state.wait_for_everyone()
    _say(state, lm.key)
    _score(lm, missing, suite, out, lm.key, options, flat=True)
    return 0


def _suite(tasks: Sequence[str], data: Path, options: argparse.Namespace) -> _Suite:
    asked = {
        "max_length": options.max_length,
        "dtype": options.dtype,
        "bos": not options.no_bos,
    }
    return _Suite(
        settings={
            name: settings_of(name, data, options.limit, options.mc_rule) | {"asked": asked}
            for name in tasks
        },
        load=cache(lambda name: load_task(name, data, options.mc_rule)),
    )


def _refresh(run: _Run, incomplete: bool) -> None:
    """Set the flat losses of a run anew, which another `--incomplete` changes."""
    results = read_results(run.file)
    found = with_losses(results, run.key, incomplete=incomplete)
    if results and found != results:
        write_results(run.file, found)


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
    *,
    flat: bool,
) -> None:
    """Score tasks one by one; the first process writes each result as it comes, and tells all at the end."""
    results = read_results(out) if out and lm.rank == 0 else {}
    for name in tasks:
        result = run_task(lm, suite.load(name), suite.settings[name])
        if result is None:
            continue
        results = with_result(results, key, name, result)
        if out:
            write_results(out, _flat(results, key, options) if flat else results)
    if flat and out and lm.rank == 0:  # also where all was scored before
        write_results(out, _flat(results, key, options))
    if lm.rank == 0:
        print(table(results["evaluations"][key]), flush=True)


def _flat(results: Results, key: str, options: argparse.Namespace) -> Results:
    return with_losses(results, key, incomplete=options.incomplete)


def _say(state: PartialState, text: str) -> None:
    if state.is_main_process:
        print(text, flush=True)
