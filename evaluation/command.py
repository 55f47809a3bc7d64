"""`python -m evaluation`: score checkpoints, `prepare` their tasks' rows, measure losses against `depth`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .names import tasks_named
from .prepare import prepare, read_sources, refuse_edited_rows
from .suite import PREFIX, TASKS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 2 after one `error: …` line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["prepare"]:
            return _prepare(_prepare_parser().parse_args(words[1:]))
        if words[:1] == ["depth"]:
            return _depth(_depth_parser().parse_args(words[1:]))
        return _evaluate(_parser().parse_args(words))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation",
        description="Losses of checkpoints on the suite's tasks. `python -m evaluation prepare` writes their data, "
        "`python -m evaluation depth` measures validation losses against recurrences.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--runs", metavar="DIR", help="run directories: scores what isn't yet")
    which.add_argument("--model", metavar="NAME", help="folder or Hub id of any causal LM")
    parser.add_argument("--out", metavar="FILE", help="JSON of --model's results")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["looped_core"],
        metavar="NAME",
        help="tasks or groups (default: looped_core)",
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="what `prepare` wrote")
    parser.add_argument("--batch-size", type=int, default=16, metavar="ROWS")
    parser.add_argument("--num-recurrences", type=int, metavar="R", help="default: the model's own")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="default: the model's")
    parser.add_argument(
        "--dtype", default="auto", help="of the weights (default: the checkpoint's)"
    )
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--revision", default="main", help="of --model on the Hub")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that --model brings"
    )
    parser.add_argument("--no-bos", action="store_true", help="for models trained without BOS")
    parser.add_argument(
        "--mc-rule", choices=("shared_prefix", "whole"), help="tokens of a choice that count"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="first N documents of a task; marks the results"
    )
    parser.add_argument(
        "--incomplete", action="store_true", help="give an axis a loss although a task is missing"
    )
    return parser


def _prepare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation prepare",
        description="Write each task's rows to DIR/<task>.jsonl, once; evaluation reads nothing else.",
    )
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument(
        "--tasks", nargs="+", default=["looped_core", "looped_extra"], metavar="NAME"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="DIR",
        help="<task>.jsonl files, for example the CORE bundle's",
    )
    parser.add_argument(
        "--partial", action="store_true", help="accept fewer rows than the suite has"
    )
    return parser


def _depth_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation depth",
        description="Validation losses of finished runs at other recurrences, for `python -m scaling depth`.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_DIR", help="folder of a finished run")
    add("--recurrences", required=True, metavar="R,R,…", help="at inference, e.g. 1,2,4,8")
    add("--out", required=True, metavar="TABLE", help=".csv, .jsonl or .parquet; goes on with it")
    add("--data", metavar="DIR", help="packed rows (default: `data` beside the run)")
    add("--rows", type=int, metavar="N", help="first N validation rows (default: all)")
    add("--batch-size", type=int, default=16, metavar="ROWS")
    return parser


def _depth(options: argparse.Namespace) -> int:
    for name in ("rows", "batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but must be at least 1.")
    from .depth import depth_table, recurrences_named  # torch takes seconds to import

    table = depth_table(
        [Path(run) for run in options.runs],
        recurrences_named(options.recurrences),
        Path(options.out),
        data=Path(options.data) if options.data else None,
        max_rows=options.rows,
        batch_size=options.batch_size,
    )
    print(table.drop(columns="weights").to_string(index=False))
    print(f"wrote {options.out}; python -m scaling depth {options.out} fits it")
    return 0


def _prepare(options: argparse.Namespace) -> int:
    source = Path(options.source) if options.source else None
    if source is not None and not source.is_dir():
        raise ValueError(f"--from is {source}, but there is no such folder.")
    for name in tasks_named(options.tasks):
        (told,) = prepare(
            Path(options.out), [name], source=source, partial=options.partial
        ).values()
        few = f" of {TASKS[name].rows}" if told["partial"] else ""
        print(
            f"{PREFIX}{name}: {told['rows']}{few} rows from {told['source']}, licence {told['licence']}"
        )
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    for name in ("batch_size", "num_recurrences", "max_length", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, but must be at least 1.")
    data, tasks = Path(options.data), tasks_named(options.tasks)
    _refuse_missing_rows(data, tasks)
    if options.out and not Path(options.out).parent.is_dir():
        raise ValueError(
            f"--out is {options.out}, but there is no folder {Path(options.out).parent}."
        )
    from .sweep import score_model, score_runs  # torch and lm-eval take seconds to import

    if options.runs:
        return score_runs(Path(options.runs), tasks, data, options)
    return score_model(tasks, data, options)


def _refuse_missing_rows(data: Path, tasks: Sequence[str]) -> None:
    missing = [name for name in tasks if not (data / f"{name}.jsonl").is_file()]
    if missing:
        raise ValueError(
            f"{data}: {missing[0]}.jsonl is missing ({len(missing)} of {len(tasks)} tasks are). Write it with `python "
            f"-m evaluation prepare --out {data} --tasks {' '.join(PREFIX + name for name in missing)}`."
        )
    known = read_sources(data)
    strange = [name for name in tasks if name not in known]
    if strange:
        raise ValueError(
            f"{data}: {strange[0]}.jsonl was not written by `python -m evaluation prepare`, so that its rows are "
            f"unchecked. Run `python -m evaluation prepare --out {data} --from {data} --partial`."
        )
    for name in tasks:
        refuse_edited_rows(data, name)
