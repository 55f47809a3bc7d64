"""NLL per token as a module of the `evaluate` library: `evaluate.load("evaluation/nll_per_token")`."""

import math
from typing import Any

import datasets
import evaluate

_DESCRIPTION = """
Mean negative log-likelihood of continuations, nats per token: the sum over all tokens of all documents divided by
their number (not the mean of the documents' means), with its standard error over documents.
"""
_INPUTS = """
predictions: nats of each document's continuation (sums). references: how many tokens each of them has.
Returns nll_per_token, stderr (null for one document) and tokens.
"""
_CITATION = """
@article{schwethelm2026recurrence,
  title={How Much Is One Recurrence Worth? Iso-Depth Scaling Laws for Looped Language Models},
  author={Schwethelm, Kristian and Rueckert, Daniel and Kaissis, Georgios},
  journal={arXiv preprint arXiv:2604.21106},
  year={2026}
}
"""


class NllPerToken(evaluate.Metric):
    """Sum of nats over sum of tokens."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, Any]:
        if not references:
            raise ValueError("references is empty: a loss needs at least one document.")
        if min(references) < 1:
            raise ValueError(
                f"references: a document has {min(references)} tokens, but each must have at least one. Leave it out."
            )
        tokens, many = sum(references), len(references)
        loss = math.fsum(predictions) / tokens
        spread = math.fsum(
            (nats - loss * count) ** 2 for nats, count in zip(predictions, references, strict=True)
        )
        stderr = math.sqrt(spread * many / (many - 1)) / tokens if many > 1 else None
        return {"nll_per_token": loss, "stderr": stderr, "tokens": tokens}
