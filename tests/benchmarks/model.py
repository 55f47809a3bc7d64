"""Looped model against LlamaForCausalLM and NanoChatForCausalLM of Transformers: training, decoding, memory.

Same width, executed depth, vocabulary, batch and dtype; every ratio comes from one run, in which the models take turns.
Peers run as they come (SDPA) and with eager attention, all of them eager and compiled; the loss of the looped model is
taken with and without its logits. `python tests/benchmarks/model.py` prints a table for each part:

    rate    of the machine's own matrix products in that dtype, [rows, width] times [width, 4·width]
    train   forward and backward, tokens/s; ratio of the looped model to each peer; fraction of the products' rate
    decode  greedy tokens/s with a dynamic cache, one row
    memory  peak of a training step above the empty process, MB, each model in a process of its own
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, NanoChatConfig, NanoChatForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.accounting import train_flops_per_token

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEPTH = 6  # executed layers: 1 + 2·2 + 1 in the looped model
HEAD_DIM = 64
console = Console(width=120)


def build(name: str, width: int, vocabulary: int, attention: str, length: int) -> torch.nn.Module:
    """Model of DEPTH executed layers, seeded."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": width // HEAD_DIM,
        "max_position_embeddings": 2 * length,
        "attn_implementation": attention,
    }
    if name == "looped":
        sections = {"num_prelude_layers": 1, "num_recurrent_layers": 2, "num_coda_layers": 1}
        return LoopedForCausalLM(LoopedConfig(**fields, **sections, num_recurrences=2))
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "nanochat": (NanoChatConfig, NanoChatForCausalLM),
    }[name]
    return model(config(**fields, num_hidden_layers=DEPTH))


def best_seconds(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Shortest time of each step, s; the steps take turns, so that a busy moment hits them alike."""
    for step in steps.values():
        step()
        step()
    times = {name: float("inf") for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def product_rate(width: int, rows: int, dtype: torch.dtype) -> float:
    """FLOP/s of [rows, width] × [width, 4·width]."""
    x, weight = torch.randn(rows, width, dtype=dtype), torch.randn(4 * width, width, dtype=dtype)
    seconds = best_seconds({"product": lambda: torch.nn.functional.linear(x, weight)}, 10)
    return 2 * rows * width * 4 * width / seconds["product"]


def training_step(model: torch.nn.Module, ids: torch.Tensor, **kwargs) -> Callable[[], None]:
    """Forward and backward of a batch."""

    def step():
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False, **kwargs).loss.backward()

    return step


def train(width: int, dtype: str, arguments: argparse.Namespace) -> None:
    """Training steps in turns; ratios of tokens/s."""
    ids = torch.randint(arguments.vocabulary, (arguments.rows, arguments.length))
    steps = {}
    for name in ("looped", "llama", "nanochat"):
        for attention in ("sdpa",) if name == "looped" else ("sdpa", "eager"):
            model = build(name, width, arguments.vocabulary, attention, arguments.length)
            model = model.to(DTYPES[dtype]).train()
            steps[f"{name} {attention}"] = training_step(model, ids)
            options = {"skip_logits": True} if name == "looped" else {}
            if options:
                steps["looped, no logits"] = training_step(model, ids, **options)
            if arguments.compiled:
                compiled = torch.compile(model, dynamic=False)
                steps[f"{name} {attention} compiled"] = training_step(compiled, ids, **options)
    seconds = best_seconds(steps, arguments.repeats)
    speed = {name: ids.numel() / s for name, s in seconds.items()}
    looped = {name: value for name, value in speed.items() if name.startswith("looped")}
    table = Table(title=f"training, width {width}, {dtype}, {arguments.rows}×{arguments.length}")
    for heading in ("model", "tokens/s", *looped):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, value in speed.items():
        ratios = (f"{own / value:.2f} ×" for own in looped.values())
        table.add_row(name, f"{value:,.0f}", *ratios)
    console.print(table)
    rate = product_rate(width, ids.numel(), DTYPES[dtype])
    flops = train_flops_per_token(model_config(width, arguments), arguments.length)
    fractions = (f"{name} {value * flops / rate:.2f}" for name, value in looped.items())
    console.print(f"products {rate / 1e9:.1f} GFLOP/s; fraction of it: " + ", ".join(fractions))


def model_config(width: int, arguments: argparse.Namespace) -> LoopedConfig:
    """Config of the looped model."""
    return build("looped", width, arguments.vocabulary, "sdpa", arguments.length).config


def decode(width: int, dtype: str, arguments: argparse.Namespace) -> None:
    """Greedy decoding of one row in turns."""
    prompt = torch.randint(arguments.vocabulary, (1, 32))
    options = {"do_sample": False, "max_new_tokens": 64, "min_new_tokens": 64, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    steps = {}
    for name in ("looped", "llama", "nanochat"):
        model = build(name, width, arguments.vocabulary, "sdpa", arguments.length)
        generate = model.to(DTYPES[dtype]).eval().generate
        steps[name] = lambda generate=generate: generate(prompt, attention_mask=mask, **options)
    seconds = best_seconds(steps, arguments.repeats)
    table = Table(title=f"decoding, width {width}, {dtype}, one row, 64 tokens after 32")
    for heading in ("model", "tokens/s", "looped / model"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, value in seconds.items():
        table.add_row(name, f"{64 / value:,.1f}", f"{value / seconds['looped']:.2f} ×")
    console.print(table)


def peak_of_step(name: str, width: int, dtype: str) -> float:
    """Peak memory of a training step at V = 32,000 and T = 1,024 above the process before the model, MB."""
    ids = torch.randint(32000, (1, 1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = {"skip_logits": True} if name == "looped, no logits" else {}
    model = build(name.split(",")[0], width, 32000, "sdpa", 1024).to(DTYPES[dtype]).train()
    training_step(model, ids, **options)()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def memory(width: int, dtype: str) -> None:
    """Peak memory, each model in a process of its own."""
    table = Table(
        title=f"peak memory of a training step, width {width}, {dtype}, V = 32,000, 1×1,024"
    )
    for heading in ("model", "MB", "of nanochat"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    peaks = {}
    for name in ("nanochat", "llama", "looped", "looped, no logits"):
        command = [sys.executable, __file__, "--peak-of", name, "--widths", str(width)]
        result = subprocess.run(
            [*command, "--dtypes", dtype], check=True, capture_output=True, text=True
        )
        peaks[name] = float(result.stdout.split()[-1])
        table.add_row(name, f"{peaks[name]:,.0f}", f"{peaks[name] / peaks['nanochat']:.2f} ×")
    console.print(table)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=["train", "decode", "memory"])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="also compiled models (minutes)")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print(peak_of_step(arguments.peak_of, arguments.widths[0], arguments.dtypes[0]))
        return
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in arguments.dtypes:
        for width in arguments.widths:
            if "train" in arguments.parts:
                train(width, dtype, arguments)
            if "decode" in arguments.parts:
                decode(width, dtype, arguments)
            if "memory" in arguments.parts:
                memory(width, dtype)


if __name__ == "__main__":
    main()
