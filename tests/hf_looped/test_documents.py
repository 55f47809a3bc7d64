"""Packed rows from our own loader: with separate documents each one is scored as if it were alone."""

import json

import numpy as np
import pytest
import torch

from training import loop
from training.config import resolve
from training.data import prepare
from training.packing import document_positions
from training.record import architecture_of
from training.sampler import rows_of_step

T = 32
INJECTIONS = ["linear", "additive", "passthrough", "diagonal", "hyperconnections"]
each_injection = pytest.mark.parametrize("injection", INJECTIONS)
each_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """recipe(name, *overrides) → run of one step over short documents, two or more to a row of 32 tokens."""
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(0)
    words = ["loop", "block", "state", "depth", "token", "prelude", "coda", "again"]
    texts = (" ".join(rng.choice(words, rng.integers(2, 7))) for _ in range(400))
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    fields = {
        "out": str(folder / "runs"),
        "steps": 1,
        "batch_tokens": 4 * T,
        "precision": "fp32",
        "log_every": 1,
        "data": {
            "corpus": "text",
            "files": [str(folder / "corpus.txt")],
            "vocab_size": 300,
            "sequence_length": T,
            "validation_fraction": 0.1,
            "separate_documents": True,
        },
        "model": {
            "hidden_size": 16,
            "recurrences": 2,
            "effective_depth": 4,
            "shared_depth": 2,
            "head_dim": 8,
        },
        "transfer": {
            "reference_width": 16,
            "reference_batch_tokens": 4 * T,
            "reference_recurrences": 2,
        },
    }
    return lambda name, *overrides: resolve(fields | {"run_id": name}, overrides)


@pytest.fixture(scope="module")
def packed(recipe):
    config = recipe("first")
    return prepare(config.data, config.data_folder, progress=False)


def rows_of(packed, indices):
    return torch.tensor(packed.train[indices], dtype=torch.long)


def documents(row, bos):
    """Parts [start, end) of a row of T inputs that begin with BOS, found one token after the other."""
    starts = [i for i, token in enumerate(row.tolist()) if token == bos] + [len(row)]
    assert starts[0] == 0 and len(starts) > 2
    return list(zip(starts, starts[1:], strict=False))


@each_attention
@each_injection
def test_logits_of_a_packed_row_are_those_of_its_documents_alone(
    tiny_model, packed, attention, injection
):
    """1e-4: float32 logits up to 15, masked sums of another length. Without positions documents see each other."""
    model = tiny_model(attention, injection=injection, vocab_size=320)
    rows = rows_of(packed, [0, 1])[:, :-1]
    positions = document_positions(rows, packed.bos_token_id)
    for training, r in ((True, 3), (False, 1)):
        model.train(training)
        common = {"use_cache": False, "num_recurrences": r}
        together = model(rows, position_ids=positions, **common).logits
        crossing = model(rows, **common).logits
        for i, row in enumerate(rows):
            for start, end in documents(row, packed.bos_token_id):
                alone = model(row[None, start:end], **common).logits[0]
                torch.testing.assert_close(together[i, start:end], alone, rtol=0, atol=1e-4)
                changed = (crossing[i, start:end] - alone).abs().max() > 0.1
                assert changed == (start > 0)


def separate_step(model, rows, bos):
    """Loss in nats and gradient norm of rows [B, T + 1], every document in a call of its own."""
    model.train().zero_grad()
    total, inputs = 0, rows[:, :-1]
    for row, targets in zip(inputs, rows[:, 1:], strict=True):
        for start, end in documents(row, bos):
            logits = model(row[None, start:end], use_cache=False).logits[0]
            losses = -logits.log_softmax(-1).gather(1, targets[start:end, None])
            total = total + losses.sum() / inputs.numel()
    total.backward()
    return total.item(), torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize(
    ("injection", "attention"), [("linear", "eager"), ("hyperconnections", "sdpa")]
)
def test_the_trainer_s_step_over_packed_rows_is_that_of_separate_documents(
    recipe, packed, attention, injection
):
    """Loss and gradient norm of the first step from the log; 1e-4: sums in another order. Crossing is another step."""
    steps = {}
    for separate in (True, False):
        config = recipe(
            f"{injection}-{attention}-{separate}",
            f"data.separate_documents={separate}",
            f"model.injection={injection}",
            f"attention={attention}",
        )
        loop.train(config)
        entry = json.loads((config.folder / "log.jsonl").read_text().splitlines()[0])
        steps[separate] = entry["loss"], entry["gradient_norm"]
    torch.manual_seed(config.seed)
    model = loop.AutoModelForCausalLM.from_config(
        architecture_of(config, packed.tokenizer), attn_implementation=attention
    )
    rows = rows_of(packed, rows_of_step(0, 4, len(packed.train), config.seed))
    expected = separate_step(model, rows, packed.bos_token_id)
    assert steps[True] == pytest.approx(expected, rel=1e-4)
    assert abs(steps[False][1] / expected[1] - 1) > 1e-3
