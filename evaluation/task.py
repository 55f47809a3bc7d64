"""A task of the suite as lm-eval runs it: rows of a data folder, shots, losses per token.

Prompt: the shots, each context, space, answer, a blank line apart, then the document's own context.
Under `--model looped` the model returns what was scored; under others (`hf`) the counts come from the
model's tokenizer, which the harness's metadata name.
"""

import os
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask

from . import metrics  # noqa: F401  # registers the aggregations that the YAML files name
from .rows import load_rows
from .suite import PREFIX, TASKS

DATA = "LOOPED_DATA"  # environment variable
SHOT_SEED = 1234
RULES = ("shared_prefix", "whole")


class OwnShots(ContextSampler):
    """Shots that depend on the document alone, not on rank, order or limit."""

    def sample(
        self, n: int, eval_doc: Mapping[str, Any] | None = None, df: Any = None, **_: Any
    ) -> Sequence[Mapping[str, Any]]:
        """Draw n other rows for a document.

        One with the document's own text gives way to the next in order that has another.
        """
        docs = self.df
        assert eval_doc is not None and len(docs) > n
        index, text = eval_doc["index"], eval_doc["prompt"]
        others = [k for k in range(len(docs)) if k != index]
        drawn = random.Random(SHOT_SEED + index).sample(others, n)
        return [docs[self._other(k, text)] for k in drawn]

    def _other(self, k: int, text: str) -> int:
        for step in range(len(self.df)):
            place = (k + step) % len(self.df)
            if self.df[place]["prompt"] != text:
                return place
        raise ValueError(f"Every row has the text {text[:60]!r}, so that there are no shots.")


class LoopedTask(ConfigurableTask):
    """Metrics: nll_per_token with its standard error, acc, bits_per_byte, and counts."""

    def __init__(self, config: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Take the keys of a task's YAML file."""
        wanted = {key: value for key, value in dict(config or {}).items() if key != "class"}
        self.info = TASKS[str(wanted["task"]).removeprefix(PREFIX)]
        rule = (wanted.get("metadata") or {}).get("mc_rule")
        if rule is not None and rule not in RULES:
            raise ValueError(f"mc_rule is {rule!r}, but must be one of {', '.join(RULES)}.")
        self._built_with: dict[str, Any] | None = None
        super().__init__(config=wanted)

    def download(self, dataset_kwargs: Any = None, **_: Any) -> None:
        """Read the rows from the data folder: metadata's data_dir, or the environment's LOOPED_DATA."""
        folder = (self.config.metadata or {}).get("data_dir") or os.environ.get(DATA)
        if not folder:
            raise ValueError(
                f'{self.config.task}: no data folder. Set --metadata \'{{"data_dir": "DIR"}}\' or the '
                f"environment's {DATA}; `python -m evaluation prepare --out DIR` writes it."
            )
        self.dataset = {"test": Dataset.from_list(load_rows(Path(folder), self.info.name))}

    def build_all_requests(self, **options: Any) -> None:
        """Build the prompts, or take those of the last model: they do not depend on it."""
        if self._built_with != options:
            super().build_all_requests(**options)
            self._built_with = options
            self._asked = {(one.doc["index"], one.idx): one.args for one in self.instances}
        for instance in self.instances:
            instance.resps, instance.filtered_resps = [], {}

    def process_results(self, doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Metrics of one document from its continuations' scores."""
        gold = doc["gold"] if self.info.choices else 0
        scored = [self._parts(doc, k, one) for k, one in enumerate(results)]
        rule = self.rule(results[0])
        losses = [nats for nats, _ in scored]
        counts = [count for _, count in scored]
        if self.info.choices and rule == "shared_prefix":
            skipped = _shared_prefix([one.tokens for one in results])
            losses = [sum(one.losses[skipped:]) for one in results]
            counts = [len(one.tokens) - skipped for one in results]
        means = [loss / count for loss, count in zip(losses, counts, strict=True)]
        right = means.index(min(means)) == gold if self.info.choices else bool(results[0][1])
        answer = f" {doc['choices'][gold]}" if self.info.choices else doc["target"]
        part = (losses[gold], counts[gold])
        told = {}  # models of lm-eval don't say whether they cut a prompt
        if hasattr(results[gold], "losses"):
            told = {
                "truncated": float(any(one.truncated for one in results)),
                "merged": float(results[gold].merged),
            }
        return {
            "nll_per_token": part,
            "nll_per_token_stderr": part,
            "acc": float(right),
            "bits_per_byte": (scored[gold][0], len(answer.encode())),
            "tokens": counts[gold],
            **told,
        }

    def rule(self, result: Any) -> str:
        """Which tokens of a choice count: those after the prefix all share, or all of them."""
        known = hasattr(result, "losses")
        wanted = (self.config.metadata or {}).get("mc_rule") or (
            "shared_prefix" if known else "whole"
        )
        if wanted == "shared_prefix" and not known:
            raise ValueError(
                f"{self.config.task}: mc_rule shared_prefix needs the losses of single tokens, which "
                "--model looped returns and this one does not. Take mc_rule whole."
            )
        return str(wanted)

    def _parts(self, doc: dict[str, Any], place: int, result: Any) -> tuple[float, int]:
        """Nats and tokens of one continuation."""
        if hasattr(result, "losses"):
            return -result[0], len(result.losses)
        context, answer = self._asked[doc["index"], place]
        encode = self._tokenizer.encode
        return -result[0], len(encode(context + answer)) - len(encode(context))

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        metadata = self.config.metadata or {}
        name = metadata.get("tokenizer") or metadata.get("pretrained")
        if not name:
            raise ValueError(
                f"{self.config.task}: the model returns no token counts and the metadata name no tokenizer. "
                'Give --metadata \'{"tokenizer": "FOLDER"}\', or use --model looped.'
            )
        options = {
            key: metadata[key] for key in ("revision", "trust_remote_code") if key in metadata
        }
        return AutoTokenizer.from_pretrained(name, **options)


def _shared_prefix(choices: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix of token ids that all choices share, leaving each a token."""
    longest = min(len(one) for one in choices) - 1
    same = 0
    while same < longest and len({one[same] for one in choices}) == 1:
        same += 1
    return same
