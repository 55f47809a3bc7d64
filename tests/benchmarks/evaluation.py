"""`--model looped` against lm-eval's own `hf`, and against one example at a time, on the same model and machine.

Examples per second of the model alone (`loglikelihood` of ready prompts, tokenisation included), the ways taking
turns, best of `--repeats`. Task types: continuation without shots, with five, multiple choice with ten; each for an
unlooped Llama and a looped model at r = 4, ten executed layers. `python tests/benchmarks/evaluation.py` prints a
table; texts are random words of the package's own sources.
"""

import argparse
import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from evaluation.lm import LoopedLM
from hf_looped import LoopedConfig, LoopedForCausalLM
from training.tokenizer import train_tokenizer

TYPES = {"continuation, 0 shots": 0, "continuation, 5 shots": 5, "multiple choice, 10 shots": 10}


def words() -> list[str]:
    """Words of the package's own sources."""
    root = Path(__file__).parents[2]
    text = " ".join(path.read_text(encoding="utf-8") for path in (root / "hf_looped").glob("*.py"))
    return [word for word in text.split() if word.isalpha()]


def requests(kind: str, count: int) -> list[Instance]:
    """Prompts and continuations of one type of task."""
    generator, known = random.Random(0), words()

    def some(low: int, high: int) -> str:
        return " ".join(generator.choices(known, k=generator.randint(low, high)))

    out = []
    for number in range(count):
        shots = [f"Question: {some(5, 15)}?\nAnswer: {some(1, 4)}" for _ in range(TYPES[kind])]
        prompt = "\n\n".join([*shots, f"Question: {some(5, 15)}?\nAnswer:"])
        for place in range(4 if "choice" in kind else 1):
            out.append(
                Instance(
                    request_type="loglikelihood",
                    doc={"index": number},
                    arguments=(prompt, f" {some(1, 4)}"),
                    idx=place,
                )
            )
    return out


def build(name: str, width: int, tokenizer: object, vocabulary: int) -> torch.nn.Module:
    """Model of ten executed layers with random weights."""
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=10,
                num_attention_heads=width // 64,
                num_key_value_heads=width // 64,
            )
        )
    config = LoopedConfig.iso_depth(
        width, 4, effective_depth=10, shared_depth=8, head_dim=64, vocab_size=vocabulary
    )
    return LoopedForCausalLM(config)


def one_at_a_time(model: torch.nn.Module, tokenizer: object, asked: list[Instance]) -> list[float]:
    """Score as a script would: one sequence, all logits, log-softmax."""
    out = []
    for one in asked:
        context, answer = one.args
        before = [tokenizer.bos_token_id, *tokenizer.encode(context, add_special_tokens=False)]
        whole = [
            tokenizer.bos_token_id,
            *tokenizer.encode(context + answer, add_special_tokens=False),
        ]
        ids = torch.tensor([whole])
        with torch.inference_mode():
            logs = model(input_ids=ids).logits[0].float().log_softmax(-1)
        targets = torch.tensor(whole[len(before) :])
        places = torch.arange(len(before) - 1, len(whole) - 1)
        out.append(float(logs[places, targets].sum()))
    return out


def measure(
    model: torch.nn.Module, tokenizer: object, kind: str, options: argparse.Namespace
) -> dict[str, float]:
    """Seconds per way of scoring, best of the repeats; all must agree to 1e-3 nats."""
    asked = requests(kind, options.examples)
    ours = LoopedLM(model, tokenizer=tokenizer, device="cpu", batch_size=options.batch_size)
    stock = HFLM(
        model, tokenizer=tokenizer, batch_size=options.batch_size, add_bos_token=True,
        softmax_dtype="float32", max_length=2048,
    )  # fmt: skip
    ways: dict[str, Callable[[], list[float]]] = {
        "looped": lambda: [one[0] for one in ours.loglikelihood(asked, disable_tqdm=True)],
        "hf": lambda: [one[0] for one in stock.loglikelihood(asked, disable_tqdm=True)],
        "one by one": lambda: one_at_a_time(model, tokenizer, asked),
    }
    seconds = dict.fromkeys(ways, float("inf"))
    values = {}
    for _ in range(options.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            values[name] = torch.tensor(way())
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    for name in ("hf", "one by one"):
        torch.testing.assert_close(values["looped"], values[name], atol=1e-3, rtol=1e-4)
    return seconds


def main() -> None:
    """Print examples per second and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tokenizer = train_tokenizer([" ".join(words())] * 3, vocab_size=2048)
    table = Table(
        title=f"examples/s, batch {options.batch_size}, width {options.width}, V {options.vocabulary}"
    )
    for name in (
        "model",
        "task",
        "looped",
        "hf",
        "one by one",
        "looped / hf",
        "looped / one by one",
    ):
        table.add_column(name, justify="right")
    for name in ("llama", "looped"):
        with tempfile.TemporaryDirectory() as folder:
            model = build(name, options.width, tokenizer, options.vocabulary).eval()
            model.config.name_or_path = folder
            for kind in TYPES:
                seconds = measure(model, tokenizer, kind, options)
                rates = [f"{options.examples / seconds[way]:.1f}" for way in seconds]
                ratios = [f"{seconds[way] / seconds['looped']:.2f}" for way in ("hf", "one by one")]
                table.add_row("looped, r = 4" if name == "looped" else name, kind, *rates, *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
