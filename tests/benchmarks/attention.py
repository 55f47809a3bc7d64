"""Causal attention on CPU, forward and backward: SDPA's kernel against `hf_looped.cpu_ops.causal_attention`.

python tests/benchmarks/attention.py [--heads 4] [--head-size 64] [--rounds 5]

`hf_looped.cpu_ops.prefers_blocks` follows this table. Rounds of both are interleaved, each on one thread; the ratio is
between the fastest rounds in CPU seconds.
"""

import argparse
import platform
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout, installed or not

from hf_looped import cpu_ops


def kernel(query, key, value, scaling):
    """SDPA, [B, H, T, C] → [B, T, H, C]."""
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2)


def main() -> None:
    """Print one row a dtype and row length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    capability = torch.backends.cpu.get_cpu_capability()
    products = "yes" if cpu_ops.MULTIPLIES_BF16 else "no"
    print(f"{platform.machine()}, {capability}, bfloat16 products: {products}")
    print("dtype  T     blocks ms  SDPA ms  SDPA / blocks")
    for dtype in (torch.float32, torch.bfloat16):
        for length in (64, 128, 256, 512, 1024, 2048):
            shape = (max(1, 512 // length), length, options.heads, options.head_size)
            leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
            best = {cpu_ops.causal_attention: float("inf"), kernel: float("inf")}
            for _ in range(options.rounds + 1):
                for attend in best:
                    heads = (leaf.transpose(1, 2) for leaf in leaves)
                    start = time.process_time()
                    attend(*heads, options.head_size**-0.5).sum().backward()
                    best[attend] = min(best[attend], time.process_time() - start)
            blocks, sdpa = (1e3 * seconds for seconds in best.values())
            name = "fp32" if dtype is torch.float32 else "bf16"
            print(f"{name}   {length:<5} {blocks:9.2f} {sdpa:8.2f}  {sdpa / blocks:.2f}")


if __name__ == "__main__":
    main()
