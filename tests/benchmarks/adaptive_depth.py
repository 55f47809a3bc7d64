"""What adaptive depth saves and what it costs in loss, on the validation rows of a trained run.

`python tests/benchmarks/adaptive_depth.py RUN_DIR` prints, for every criterion that the model has and every threshold:

    r        mean recurrences of a token
    loss     nats per token (full depth: threshold 0)
    FLOPs    matrix products that ran, counted by PyTorch, as a share of full depth's
    time     of scoring the rows in batches, and of decoding token by token, as shares of full depth's

Rows that have no token left are not computed, and of the others only their active tokens, padded to the longest: FLOPs
are those that ran. All settings take turns, and the shortest time of each counts.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from hf_looped import AdaptiveDepth, LoopedForCausalLM

THRESHOLDS = {
    "gate": (0.1, 0.3, 0.5, 0.7),
    "change": (0.05, 0.1, 0.2, 0.4),
    "kl": (0.001, 0.01, 0.05, 0.2),
}
console = Console(width=120)


def rows_of(run: Path, count: int) -> torch.Tensor:
    """Validation rows [count, T + 1] of a run's data."""
    shards = [
        np.load(path, mmap_mode="r")
        for path in sorted((run.parent / "data" / "validation").glob("*.npy"))
    ]
    return torch.as_tensor(np.concatenate(shards)[:count].astype(np.int64))


@torch.inference_mode()
def score(
    model: LoopedForCausalLM, rows: torch.Tensor, depth: AdaptiveDepth | None, batch: int
) -> tuple[float, float]:
    """Loss in nats per token, and mean recurrences."""
    losses, used = [], []
    for part in rows.split(batch):
        output = model(part[:, :-1], adaptive_depth=depth, use_cache=False)
        losses.append(
            torch.nn.functional.cross_entropy(output.logits.transpose(1, 2), part[:, 1:])
            * len(part)
        )
        if depth is not None:
            used.append(output.recurrences_used.double().mean() * len(part))
    mean = sum(used) / len(rows) if used else model.config.num_recurrences
    return float(sum(losses) / len(rows)), float(mean)


def decode(model: LoopedForCausalLM, rows: torch.Tensor, depth: AdaptiveDepth | None) -> None:
    """Generate greedily after the first quarter of each row."""
    prompt = rows[:, : rows.shape[1] // 4]
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=rows.shape[1] // 4,
        min_new_tokens=rows.shape[1] // 4,
        do_sample=False,
        adaptive_depth=depth,
        pad_token_id=0,
    )


def best_seconds(steps: list[Callable[[], object]], repeats: int) -> list[float]:
    """Shortest time of each step, s; the steps take turns."""
    times = [float("inf")] * len(steps)
    for _ in range(repeats):
        for place, step in enumerate(steps):
            start = time.perf_counter()
            step()
            times[place] = min(times[place], time.perf_counter() - start)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished run, its data beside it")
    parser.add_argument("--rows", type=int, default=128, help="validation rows (default: 128)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a batch (default: 16)")
    parser.add_argument("--per", choices=("token", "sequence"), default="token")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = LoopedForCausalLM.from_pretrained(options.run / "checkpoint").eval()
    rows = rows_of(options.run, options.rows)
    settings: list[AdaptiveDepth | None] = [None]
    for criterion, thresholds in THRESHOLDS.items():
        if criterion != "gate" or model.config.exit_gate:
            settings += [
                AdaptiveDepth(criterion=criterion, threshold=threshold, per=options.per)
                for threshold in thresholds
            ]
    losses = [score(model, rows, depth, options.batch) for depth in settings]
    scoring = best_seconds(
        [lambda depth=depth: score(model, rows, depth, options.batch) for depth in settings],
        options.repeats,
    )
    decoding = best_seconds(
        [lambda depth=depth: decode(model, rows[:4], depth) for depth in settings], options.repeats
    )
    model.set_attn_implementation("eager")  # whose products PyTorch counts on CPUs
    flops = []
    for depth in settings:
        with FlopCounterMode(display=False) as counter:
            score(model, rows, depth, options.batch)
        flops.append(counter.get_total_flops())
    config = model.config
    table = Table(
        title=f"{options.run.name}: width {config.hidden_size}, r = {config.num_recurrences}, per {options.per}"
    )
    for column in ("criterion", "threshold", "r", "loss", "FLOPs", "time", "time, decoding"):
        table.add_column(column, justify="left" if column == "criterion" else "right")
    for depth, (loss, mean), products, seconds, slow in zip(
        settings, losses, flops, scoring, decoding, strict=True
    ):
        name, threshold = (
            ("full depth", "0") if depth is None else (depth.criterion, f"{depth.threshold:g}")
        )
        shares = (products / flops[0], seconds / scoring[0], slow / decoding[0])
        table.add_row(
            name, threshold, f"{mean:.2f}", f"{loss:.4f}", *(f"{share:.2f}" for share in shares)
        )
    console.print(table)


if __name__ == "__main__":
    main()
