"""`--model looped` of lm-evaluation-harness: any causal LM of Transformers, scored without a cache.

What lm-eval's own `hf` model lacks: losses and counts of the tokens that were scored, log-softmax in
float32 whatever the dtype, `num_recurrences`, one pass over a context that several choices share,
every distinct request once.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

import hf_looped  # noqa: F401  # registers the architecture

from .scoring import Request, is_causal, score, takes_trees


def processes() -> PartialState:
    """Join the processes that torchrun or Accelerate started, on CPUs too."""
    return PartialState(cpu=not torch.accelerator.is_available())


class LogLikelihood(tuple[float, bool]):
    """(log-likelihood, greedy) as lm-eval's tasks unpack it, and what stands behind it.

    losses: nats of each scored token. greedy: whether each was the likeliest. tokens: their ids.
    truncated: the context was cut. merged: a token spans context and continuation.
    """

    losses: tuple[float, ...]
    greedy: tuple[bool, ...]
    tokens: tuple[int, ...]
    truncated: bool
    merged: bool

    def __new__(
        cls,
        losses: Sequence[float],
        greedy: Sequence[bool],
        tokens: Sequence[int],
        *,
        truncated: bool,
        merged: bool,
    ) -> "LogLikelihood":
        """Sum the losses."""
        self = super().__new__(cls, (-sum(losses), all(greedy)))
        self.losses, self.greedy, self.tokens = tuple(losses), tuple(greedy), tuple(tokens)
        self.truncated, self.merged = truncated, merged
        return self


@register_model("looped")
class LoopedLM(HFLM):
    """A causal LM that returns losses token by token.

    pretrained: folder, Hub id or model. num_recurrences: for looped models (default: the
    config's). dtype: of the weights ("auto": the checkpoint's). max_length: tokens of context and
    continuation (default: the config's); longer contexts are cut from the left. add_bos_token: BOS
    in front of every prompt. Raises ValueError for a checkpoint without tokenizer, a tokenizer without BOS and EOS, a
    model that isn't causal.

    weights: fingerprint of what was loaded, a folder's files or the Hub's commit; None for a model made in memory.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        num_recurrences: int | None = None,
        tokenizer: Any = None,
        revision: str = "main",
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        trust_remote_code: bool = False,
        add_bos_token: bool = True,
    ) -> None:
        """Load the model and try once what it can do."""
        self._state = processes()
        where = torch.device(device) if device else self._state.device
        model = pretrained
        if isinstance(model, str):
            model = _model(model, revision, dtype, trust_remote_code)
        model.to(device=where).eval()  # type: ignore[call-arg]
        name = tokenizer or model.config.name_or_path
        super().__init__(
            pretrained=model,
            tokenizer=_tokenizer(name, revision, trust_remote_code)
            if isinstance(name, str)
            else name,
            batch_size=_whole("batch_size", batch_size),
            max_length=max_length,
            add_bos_token=add_bos_token,
        )
        self.revision = revision
        folder = Path(model.config.name_or_path or "")
        saved = bool(model.config.name_or_path) and folder.is_dir()
        self.weights: str | None = (
            folder_sha256(folder) if saved else getattr(model.config, "_commit_hash", None)
        )
        self.num_recurrences = _recurrences(model, num_recurrences)
        self._rank, self._world_size = self._state.process_index, self._state.num_processes
        _refuse_no_bos(self.tokenizer, str(name), add_bos_token)
        vocab_size = int(model.config.get_text_config().vocab_size)
        if not is_causal(self._logits, vocab_size, where, length=max(2, min(12, self.max_length))):
            raise ValueError(
                f"{name}: later tokens change the logits of earlier ones, so that a continuation's loss would "
                "know its answer. Only causal models can be scored."
            )
        self._trees = (
            self.max_length > 12
            and not _has_windows(model.config.get_text_config())
            and takes_trees(self._logits, vocab_size, where)
        )

    @property
    def key(self) -> str:
        """Model, revision and recurrences: what a result belongs to."""
        name = self.model.config.name_or_path or type(self.model).__name__
        loops = "" if self.num_recurrences is None else f", r = {self.num_recurrences}"
        return f"{name}@{self.revision}{loops}"

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's cache of results."""
        raise ValueError(
            "use_cache: lm-eval's cache does not know model, revision and recurrences, so that a second "
            "model would get the first one's numbers. Leave it out; finished tasks are skipped anyway."
        )

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collect one number of every process."""
        if self.world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, tensor)
        return torch.stack(parts)

    def barrier(self) -> None:
        """Wait for the other processes."""
        self._state.wait_for_everyone()

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[LogLikelihood]:
        """Score continuations given contexts."""
        encoded = self._encoded([request.args for request in requests])
        cut = [self._cut(*pair[:2]) for pair in encoded]
        bar = tqdm(
            total=len(set(cut)),
            desc="continuations",
            disable=disable_tqdm or self.rank != 0,
        )
        with bar:
            scores = score(
                self._logits,
                cut,
                batch_size=self.batch_size,
                device=self.device,
                trees=self._trees,
                done=bar.update,
            )
        return [
            LogLikelihood(
                one.losses,
                one.greedy,
                request.continuation,
                truncated=len(request.context) < len(context),
                merged=merged,
            )
            for one, request, (context, _, merged) in zip(scores, cut, encoded, strict=True)
        ]

    def _encoded(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int], bool]]:
        """Token ids of contexts and continuations, and whether a token spans both.

        Text and context are tokenised; what the text has beyond the number of context tokens is scored.
        White space at the end of a context belongs to the continuation. Both as in `HFLM`.
        """
        pairs = [_joint(*pair) for pair in pairs]
        wanted = {text for context, answer in pairs for text in (context, context + answer) if text}
        ordered = sorted(wanted)
        batches = self.tokenizer(ordered, add_special_tokens=False)["input_ids"] if ordered else []
        texts = dict(zip(ordered, batches, strict=True))
        prefix = [self.prefix_token_id]
        out = []
        for context, answer in pairs:
            before, whole = texts[context] if context else [], texts[context + answer]
            scored = whole[len(before) :]
            if not scored:
                raise ValueError(
                    f"The tokenizer leaves nothing to score of the continuation {answer!r} after "
                    f"…{context[-40:]!r}: its tokens end within the context's. Leave the row out."
                )
            bare = before and (before[:1] == prefix or not self.add_bos_token)
            out.append(
                (before if bare else prefix + before, scored, whole[: len(before)] != before)
            )
        return out

    def _cut(self, context: list[int], continuation: list[int]) -> Request:
        """Cut a context from the left so that both fit; the model never reads the last token."""
        room = self.max_length - (len(continuation) - 1)
        if room < 1:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens, {self.tokenizer.decode(continuation[:12])!r}…, does "
                f"not fit into max_length = {self.max_length}. Raise it (--max-length), or leave the row out."
            )
        return Request(context=tuple(context[-room:]), continuation=tuple(continuation))

    @torch.inference_mode()
    def _logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Logits at the positions in logits_to_keep. [B, P, V]."""
        if self.num_recurrences is not None:
            inputs["num_recurrences"] = self.num_recurrences  # type: ignore[assignment]
        mask = inputs.get("attention_mask")
        if mask is not None:  # additive: what every attention takes
            dtype = self.model.dtype
            seen = torch.zeros((), dtype=dtype, device=mask.device)
            inputs["attention_mask"] = torch.where(mask, seen, torch.finfo(dtype).min)
        try:
            output: torch.Tensor = self.model(**inputs, use_cache=False).logits
        except IndexError as error:
            length = inputs["input_ids"].shape[1]
            raise ValueError(
                f"{self.model.config.name_or_path}: {length} tokens are too many for this model ({error}). Lower "
                "max_length (--max-length) to the positions that it has."
            ) from error
        return output


def folder_sha256(folder: Path) -> str:
    """Fingerprint of a checkpoint's files: weights, config and tokenizer."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".model", ".py"):
            with path.open("rb") as file:
                total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _has_windows(config: PreTrainedConfig) -> bool:
    """Whether some layers see only the nearest tokens, so that they need their own masks."""
    layers = getattr(config, "layer_types", None) or []
    names = ("sliding_window", "attention_chunk_size", "window_size", "attention_types")
    return any(getattr(config, name, None) for name in names) or any(
        kind != "full_attention" for kind in layers
    )


def _joint(context: str, answer: str) -> tuple[str, str]:
    """Move white space from the end of a context to the continuation."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + answer


def _model(
    name: str, revision: str, dtype: str | torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    try:
        found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, SafetensorError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{name}: no causal LM could be loaded ({why}). Give a folder written by save_pretrained, or a Hub id."
        ) from error
    return found


def _tokenizer(name: str, revision: str, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{name}: no tokenizer could be loaded ({why}). Save it beside the model with "
            "tokenizer.save_pretrained (from Python, tokenizer=… takes another)."
        ) from error


def _refuse_no_bos(tokenizer: Any, name: str, wanted: bool) -> None:
    if wanted and tokenizer.bos_token_id is None:
        raise ValueError(
            f"{name}: the tokenizer has no BOS token, but the suite's prompts begin with one. Set "
            "tokenizer.bos_token, or --no-bos (add_bos_token=False) for a model that was trained without."
        )
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"{name}: the tokenizer has neither BOS nor EOS to stand before an empty prompt. Set one."
        )


def _whole(name: str, value: int | str) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 1.")
    return int(value)


def _recurrences(model: PreTrainedModel, wanted: int | None) -> int | None:
    """Recurrences of a looped model, None of any other."""
    own = getattr(model.config, "num_recurrences", None)
    if wanted is None:
        return own
    if own is None:
        raise ValueError(
            f"num_recurrences is {wanted}, but {type(model).__name__} has no loop. Leave it out."
        )
    return _whole("num_recurrences", wanted)
