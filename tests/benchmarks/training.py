"""Packing, loading and optimiser against plain references, as ratios from one run.

`python tests/benchmarks/training.py [--section NAME] [--json FILE]` prints a table for each section; the contestants
take turns, and each has its best time of several rounds:

    packing  tokens/s of `pack` against a loop that scans a list for the best fit, on one core and on all
    loading  time to fetch the rows of a step, in percent of a training step of the nano recipe's model
    muonh    MuonH's step against torch.optim.Muon's on the 120 matrices of 20 layers
    step     MuonH's share of a training step of 4,096 tokens, 20 layers of width 128
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from training.packing import PackingCounts, pack

if TYPE_CHECKING:  # the processes that pack import this module and need neither of them
    import torch
    from rich.table import Table

BOS, BUFFER, VOCABULARY = 0, 1000, 32_000
MEAN_TOKENS, SIGMA = 600, 1.0  # of the log-normal lengths of documents
LAYERS = 20
NANO = Path(__file__).parents[2] / "training" / "recipes" / "nano.yaml"

Document = np.ndarray | list[int]


def best_seconds(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Shortest time of each, s; they take turns, so that a busy moment hits them alike."""
    times = dict.fromkeys(contestants, float("inf"))
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def make_documents(count: int, seed: int) -> list[np.ndarray]:
    """Documents of log-normal length, uint16 as packing gets them from the tokenizer."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, count).astype(int) + 1
    return [rng.integers(1, VOCABULARY, length).astype(np.uint16) for length in lengths]


def pack_by_loop(documents: list[Document], row_length: int) -> tuple[np.ndarray, int]:
    """Best fit read out loud: for every choice scan the list of waiting documents. → rows, cropped tokens."""
    arriving, waiting, rows, cropped = iter(documents), [], [], 0
    row: list[int] = []
    while True:
        while len(waiting) < BUFFER and (document := next(arriving, None)) is not None:
            waiting.append(document)
        if not waiting:
            return np.array(rows), cropped
        space, best, longest = row_length - len(row), None, 0
        for i, document in enumerate(waiting):
            length = len(document) + 1
            if longest < length <= space:
                best, longest = i, length
        if best is None:
            best = min(range(len(waiting)), key=lambda i: len(waiting[i]))
        document = waiting.pop(best)
        row.append(BOS)
        row.extend(document[: space - 1])
        cropped += max(0, len(document) + 1 - space)
        if len(row) == row_length:
            rows.append(np.array(row, dtype=np.int32))
            row = []


def pack_by_module(documents: list[Document], row_length: int) -> tuple[np.ndarray, int]:
    """Pack with `training.packing`. → rows, cropped tokens."""
    counts = PackingCounts()
    options = {"row_length": row_length, "bos_token_id": BOS, "buffer": BUFFER, "counts": counts}
    return np.concatenate(list(pack(documents, **options))), counts.cropped


_ready: Any  # of a process that packs: the barrier at which they wait for each other


def _start_process(barrier: Any) -> None:
    global _ready
    _ready = barrier


def _pack_in_process(count: int, seed: int, row_length: int) -> tuple[float, float, int, int]:
    """Pack documents of its own while the others do. → start and end on the clock, tokens, rows."""
    documents = make_documents(count, seed)
    _ready.wait()
    start = time.time()
    rows, _ = pack_by_module(documents, row_length)
    return start, time.time(), sum(map(len, documents)) + count, len(rows)


def tokens_per_second_on_cores(cores: int, count: int, row_length: int, rounds: int) -> float:
    """Best of several rounds in which every core packs a shard of `count` documents at once."""
    context = get_context("spawn")
    options = {"mp_context": context, "initializer": _start_process}
    best = 0.0
    with ProcessPoolExecutor(cores, initargs=(context.Barrier(cores),), **options) as pool:
        for _ in range(rounds):
            shards = [pool.submit(_pack_in_process, count, n, row_length) for n in range(cores)]
            starts, ends, tokens, _ = zip(*(shard.result() for shard in shards), strict=True)
            best = max(best, sum(tokens) / (max(ends) - min(starts)))
    return best


def packing(rounds: int) -> tuple["Table", dict[str, Any]]:
    """Tokens/s of both on the same documents; rows must be equal."""
    count, cores = 5000, len(os.sched_getaffinity(0))
    arrays = make_documents(count, seed=0)
    tokens = sum(map(len, arrays)) + count  # with BOS
    headings = ("documents", "row", "rows", "cropped", "loop", "pack", "ratio")
    table = new_table(
        f"packing {tokens:,} tokens in {count:,} documents, million tokens/s",
        *headings,
        f"pack on {cores} cores",
        "ratio",
    )
    results: dict[str, Any] = {}
    for row_length in (257, 2049):
        on_cores = tokens_per_second_on_cores(cores, count, row_length, rounds)
        for kind, documents in (("arrays", arrays), ("lists", [d.tolist() for d in arrays])):
            packed: dict[str, tuple[np.ndarray, int]] = {}

            def take_turn(name: str, function: Callable, row_length=row_length) -> Callable:
                return lambda: packed.update({name: function(documents, row_length)})  # noqa: B023

            turns = {"loop": pack_by_loop, "pack": pack_by_module}
            seconds = best_seconds({n: take_turn(n, f) for n, f in turns.items()}, rounds)
            (expected, expected_cropped), (rows, cropped) = packed["loop"], packed["pack"]
            if cropped != expected_cropped or not np.array_equal(rows, expected):
                raise SystemExit(f"rows of {row_length} tokens differ between loop and pack")
            result = {
                "rows": len(rows),
                "cropped_share": cropped / tokens,
                "loop_tokens_per_s": tokens / seconds["loop"],
                "pack_tokens_per_s": tokens / seconds["pack"],
                "ratio": seconds["loop"] / seconds["pack"],
                "cores": cores,
                "cores_tokens_per_s": on_cores,
                "cores_ratio": on_cores * seconds["loop"] / tokens,
            }
            results[f"{kind}, rows of {row_length}"] = result
            table.add_row(
                kind,
                f"{row_length:,}",
                f"{len(rows):,}",
                f"{result['cropped_share']:.1%}",
                f"{result['loop_tokens_per_s'] / 1e6:.1f}",
                f"{result['pack_tokens_per_s'] / 1e6:.1f}",
                f"{result['ratio']:.1f} ×",
                f"{on_cores / 1e6:.1f}" if kind == "arrays" else "",
                f"{result['cores_ratio']:.1f} ×" if kind == "arrays" else "",
            )
    return table, results


def loading(rounds: int) -> tuple["Table", dict[str, Any]]:
    """Rows of random steps from 16 shards against a training step of the nano recipe's model."""
    from training.config import load_config
    from training.sampler import rows_of_step
    from training.shards import open_shards, shard_paths, write_shard

    config = load_config(NANO)
    row_length, rng = config.data.sequence_length + 1, np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        records = [
            write_shard(
                path,
                [rng.integers(0, config.data.vocab_size, (4000, row_length))],
                row_length=row_length,
                dtype="<u2",
            )
            for path in shard_paths(Path(folder), 16)
        ]
        rows = open_shards(Path(folder), records, row_length)
        wanted = [rows_of_step(step, config.batch_rows, len(rows), seed=0) for step in range(200)]
        architecture = config.model.build(config.data.vocab_size, config.data.sequence_length)
        train = training_step(architecture, rows[wanted[0]])
        seconds = best_seconds(
            {"rows": lambda: [rows[w] for w in wanted], "step": lambda: train["both"]()}, 5 * rounds
        )
    result = {
        "rows_s": seconds["rows"] / len(wanted),
        "step_s": seconds["step"],
        "share": seconds["rows"] / len(wanted) / seconds["step"],
    }
    title = f"{config.batch_rows} rows of {row_length} tokens from {len(rows):,} in 16 shards"
    table = new_table(title, "rows", "step of the nano recipe", "share")
    table.add_row(
        f"{1e6 * result['rows_s']:.0f} µs",
        f"{1e3 * result['step_s']:.1f} ms",
        f"{result['share']:.3%}",
    )
    return table, result


def training_step(architecture: Any, rows: np.ndarray) -> dict[str, Callable[[], None]]:
    """Parts of a step on rows [B, T + 1]: `passes` (forward and backward), `optimizer`, and `both`."""
    import torch
    from transformers import AutoModelForCausalLM

    from training.hardware import multiplies_bf16
    from training.muonh import MuonH

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(architecture).train()
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if "proj.weight" in name]
    others = [p for name, p in named.items() if "proj.weight" not in name]
    optimizer = MuonH(
        [
            {"params": matrices, "algorithm": "muonh", "lr": 0.01},
            {"params": others, "algorithm": "adamw", "lr": 0.001},
        ],
        orthogonalise_dtype=torch.bfloat16 if multiplies_bf16() else torch.float32,
    )
    tokens = torch.as_tensor(rows, dtype=torch.long)

    def passes() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=multiplies_bf16()):
            loss = model(
                input_ids=tokens[:, :-1],
                shift_labels=tokens[:, 1:].contiguous(),
                use_cache=False,
                skip_logits=True,
            ).loss
        loss.backward()

    def both() -> None:
        passes()
        optimizer.step()

    return {"passes": passes, "optimizer": optimizer.step, "both": both}


def muonh(rounds: int) -> tuple["Table", dict[str, Any]]:
    """Steps of both optimisers on matrices of their own with equal values and gradients."""
    import torch

    from training.hardware import multiplies_bf16
    from training.muonh import MuonH

    favoured = torch.bfloat16 if multiplies_bf16() else torch.float32
    dtypes = dict.fromkeys((favoured, torch.float32))
    table = new_table(
        f"a step on the {6 * LAYERS} matrices of {LAYERS} layers, ms",
        "d",
        "torch.optim.Muon (bf16)",
        *(f"MuonH, {str(dtype).removeprefix('torch.')}" for dtype in dtypes),
        *("ratio" for _ in dtypes),
    )
    results: dict[str, Any] = {}
    for d in (128, 256):
        steps: dict[str, Callable[[], Any]] = {
            "torch.optim.Muon": torch.optim.Muon(_matrices(d), lr=0.01, weight_decay=0.0).step
        }
        for dtype in dtypes:
            group = {"params": _matrices(d), "algorithm": "muonh", "lr": 0.01}
            steps[str(dtype)] = MuonH([group], orthogonalise_dtype=dtype).step
        seconds = best_seconds(steps, rounds)
        muon, *ours = seconds.values()
        table.add_row(
            str(d),
            *(f"{1e3 * s:.0f}" for s in seconds.values()),
            *(f"{s / muon:.2f}" for s in ours),
        )
        results[f"d = {d}"] = {f"{name}_s": s for name, s in seconds.items()} | {
            f"{name}_ratio": s / muon for name, s in seconds.items()
        }
    return table, results


def _matrices(d: int) -> list["torch.nn.Parameter"]:
    """q, k, v, o, up and down of every layer, with gradients."""
    import torch

    generator = torch.Generator().manual_seed(0)
    matrices = []
    for _ in range(LAYERS):
        for shape in ((d, d), (d, d), (d, d), (d, d), (4 * d, d), (d, 4 * d)):
            matrix = torch.nn.Parameter(torch.randn(shape, generator=generator) / d**0.5)
            matrix.grad = torch.randn(shape, generator=generator) * 1e-3
            matrices.append(matrix)
    return matrices


def step(rounds: int) -> tuple["Table", dict[str, Any]]:
    """Optimiser and passes take turns in one process; unlooped, where every layer has matrices of its own."""
    from hf_looped import LoopedConfig

    width, length, vocabulary = 128, 256, 1024
    architecture = LoopedConfig.iso_depth(
        width, 1, effective_depth=LAYERS, shared_depth=16, head_dim=64, vocab_size=vocabulary
    )
    rows = np.random.default_rng(0).integers(0, vocabulary, (4096 // length, length + 1))
    train = training_step(architecture, rows)
    del train["both"]
    seconds = best_seconds(train, rounds)
    share = seconds["optimizer"] / sum(seconds.values())
    title = f"a step of {rows.shape[0]} × {length} tokens, {LAYERS} layers, width {width}, ms"
    table = new_table(title, "forward and backward", "MuonH", "MuonH's share", "goal")
    table.add_row(
        f"{1e3 * seconds['passes']:.0f}",
        f"{1e3 * seconds['optimizer']:.0f}",
        f"{share:.1%}",
        "≤ 10 %",
    )
    return table, {f"{name}_s": s for name, s in seconds.items()} | {"share": share}


def new_table(title: str, *headings: str) -> "Table":
    """Table with the facts of the machine below it."""
    from rich.table import Table

    table = Table(title=title, caption=machine())
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def machine() -> str:
    """Cores, threads, bf16 and versions."""
    import torch

    from training.hardware import multiplies_bf16

    bf16 = "bf16 products" if multiplies_bf16() else "no bf16 products"
    return (
        f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads, {bf16}; "
        f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}"
    )


SECTIONS = {"packing": packing, "loading": loading, "muonh": muonh, "step": step}


def main() -> None:
    """Run one section or all."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--section", choices=SECTIONS, help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers, too")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    for name, section in SECTIONS.items():
        if arguments.section in (None, name):
            table, results[name] = section(arguments.rounds)
            Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
