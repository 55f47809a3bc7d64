"""What a model writes: greedy continuations of validation rows beside the text's own, as samples.md.

Shapes: n rows of T + 1 tokens.
"""

import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hf_looped import LoopedForCausalLM

from .files import write_text


def write_samples(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: NDArray[np.int32],
    path: Path,
    prompt_tokens: int = 32,
    new_tokens: int = 48,
) -> None:
    """Continue the first tokens of each row, [n, T + 1], and write prompt, continuation and true continuation.

    Greedy, among the tokenizer's entries, and past the end of a document. Where rows or the model's positions are
    fewer than `prompt_tokens + new_tokens`, both shrink in proportion. The model is the bare one (not wrapped, not
    sharded); in training with flash attention call this under the same autocast.
    """
    length = min(model.config.max_position_embeddings, rows.shape[1])
    if prompt_tokens + new_tokens > length:
        prompt_tokens = max(1, length * prompt_tokens // (prompt_tokens + new_tokens))
        new_tokens = length - prompt_tokens
    parts = [f"# Samples\n\nGreedy, {prompt_tokens} tokens continued by {new_tokens}.\n"]
    for number, row in enumerate(rows, start=1):
        prompt, truth = row[:prompt_tokens], row[prompt_tokens : prompt_tokens + new_tokens]
        texts = {
            "Prompt": prompt,
            "Model": continue_greedily(model, prompt, new_tokens, len(tokenizer)),
            "Text": truth,
        }
        parts.append(f"## {number}\n")
        for title, tokens in texts.items():
            text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
            parts.append(f"{title}:\n\n{_fenced(str(text))}\n")
    write_text(path, "\n".join(parts))


@torch.no_grad()
def continue_greedily(
    model: LoopedForCausalLM, prompt: NDArray[np.int32], new_tokens: int, vocabulary: int
) -> NDArray[np.int64]:
    """Return the likeliest tokens after a prompt, [new_tokens], each among the first `vocabulary` ids.

    Not `generate`: it would stop after a document and take penalties from a checkpoint's generation config. One row at
    a time: in a batch the rounding, and with it a close choice, would depend on the other rows.
    """
    ids = torch.as_tensor(prompt, dtype=torch.long, device=model.device)[None]
    cache, found = None, []
    training = model.training
    model.eval()
    try:
        for _ in range(new_tokens):
            output = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
            cache, ids = output.cache, output.logits[..., :vocabulary].argmax(dim=-1)
            found.append(ids)
    finally:
        model.train(training)
    return torch.cat(found, dim=1)[0].cpu().numpy()


def _fenced(text: str) -> str:
    """Put text into a code block whose fence is longer than any in it; control characters as escapes."""
    shown = "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
    fence = "`" * max([3] + [len(run) + 1 for run in re.findall("`+", shown)])
    return f"{fence}\n{shown}\n{fence}"
