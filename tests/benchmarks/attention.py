"""Plain products against SDPA in a training step on CPU, by dtype and row length: ratios measured in one run.

python tests/benchmarks/attention.py [--width 64] [--rounds 5]

`training.hardware.choose_attention` follows this table. Rounds of both are interleaved, each on one thread; the
ratio is between the fastest rounds in CPU seconds.
"""

import argparse
import platform
import time

import torch

from hf_looped import LoopedConfig, LoopedForCausalLM
from training.hardware import multiplies_bf16


def step_seconds(model: LoopedForCausalLM, tokens: torch.Tensor, bf16: bool) -> float:
    """CPU seconds of one forward and backward pass."""
    start = time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return time.process_time() - start


def main() -> None:
    """Print one row a dtype and row length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = LoopedConfig.iso_depth(options.width, 4, 6, 4, head_dim=16, vocab_size=512)
    models = {}
    for name in ("eager", "sdpa"):
        torch.manual_seed(0)
        models[name] = LoopedForCausalLM(config).train()
        models[name].set_attn_implementation(name)
    print(
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, bf16 products: {multiplies_bf16()}"
    )
    print("dtype  T     eager ms  sdpa ms  sdpa / eager")
    for bf16 in (False, True) if multiplies_bf16() else (False,):
        for length in (128, 256, 512, 1024):
            tokens = torch.randint(512, (2048 // length, length))
            best = dict.fromkeys(models, float("inf"))
            for _ in range(options.rounds + 1):
                for name, model in models.items():
                    best[name] = min(best[name], step_seconds(model, tokens, bf16))
            eager, sdpa = 1e3 * best["eager"], 1e3 * best["sdpa"]
            dtype = "bf16" if bf16 else "fp32"
            print(f"{dtype}   {length:<5} {eager:8.1f} {sdpa:8.1f}  {sdpa / eager:.2f}")


if __name__ == "__main__":
    main()
