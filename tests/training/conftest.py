"""A small text corpus and a tiny recipe that every test of a run starts from."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from training.config import TrainingConfig, resolve

T = 32


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory) -> Path:
    """900 sentences of a small grammar, one document each; two or three fit into a row."""
    rng = np.random.default_rng(0)
    subjects = [
        "a looped model",
        "the shared block",
        "one recurrence",
        "a deep network",
        "the state",
    ]
    verbs = ["reads", "repeats", "improves", "forgets", "predicts"]
    objects = ["the prelude", "every token", "its own output", "the coda", "a long document"]
    sentences = [
        " ".join(str(rng.choice(part)) for part in (subjects, verbs, objects)) + f" {i % 97}."
        for i in range(900)
    ]
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n\n".join(sentences))
    return path


@pytest.fixture(scope="session")
def recipe_fields(corpus_file) -> dict:
    """Plain fields of a recipe: width 16, three executed layers, rows of 32 tokens, four a step."""
    return {
        "batch_tokens": 4 * T,
        "precision": "fp32",
        "log_every": 1,
        "samples": 1,
        "data": {
            "corpus": "text",
            "files": [str(corpus_file)],
            "vocab_size": 300,
            "sequence_length": T,
            "validation_fraction": 0.1,
        },
        "model": {
            "hidden_size": 16,
            "recurrences": 2,
            "effective_depth": 4,
            "shared_depth": 2,
            "head_dim": 8,
        },
        "optimizer": {
            "muonh_lr": 0.03,
            "embedding_lr": 0.3,
            "lm_head_lr": 0.02,
            "orthogonalise": "fp32",
        },
        "transfer": {
            "reference_width": 16,
            "reference_batch_tokens": 4 * T,
            "reference_recurrences": 2,
        },
    }


@pytest.fixture(scope="session")
def recipe(recipe_fields, tmp_path_factory) -> Callable[..., TrainingConfig]:
    """recipe("name", "field=value", …) → a run of 8 steps; runs share one folder and its data."""
    out = tmp_path_factory.mktemp("runs")

    def make(run_id: str, *overrides: str) -> TrainingConfig:
        fields = recipe_fields | {"run_id": run_id, "out": str(out), "steps": 8}
        return resolve(fields, overrides)

    return make
