"""Tokenizers: a byte-level BPE trained on the corpus, or a Transformers tokenizer with BOS.

Every document of the packed data begins with BOS, so a tokenizer must have one.
"""

import hashlib
import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # id 0: BOS, EOS and padding in one, as in GPT-2
MIN_VOCAB_SIZE = 257  # the 256 bytes and END_OF_TEXT


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` tokens, trained on `texts`.

    Encoding puts BOS in front unless `add_special_tokens=False`; any text is encoded and decoded
    without loss, since all 256 bytes are tokens. Short texts give fewer tokens than asked. The
    same texts in the same order give the same tokenizer. Raises ValueError when `vocab_size` has
    no room for the bytes.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"data.vocab_size: {vocab_size} is below {MIN_VOCAB_SIZE}, the 256 bytes and "
            f"{END_OF_TEXT}; ask for more (1024 suits some tens of MB and a million parameters)."
        )
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A:0 $B:0",
        special_tokens=[(END_OF_TEXT, 0)],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Load a Transformers tokenizer; ValueError when it cannot be loaded or has no BOS token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"data.tokenizer: {name_or_path!r} cannot be loaded ({reason}). Give a folder made by "
            "save_pretrained or a Hub name, or leave it empty to train one on the corpus."
        ) from error
    if tokenizer.bos_token_id is None:
        candidate = tokenizer.eos_token or tokenizer.pad_token or END_OF_TEXT
        raise ValueError(
            f"data.tokenizer: {name_or_path!r} has no bos_token, and every document begins with "
            f"one. Choose one and save a copy: tokenizer.bos_token = {candidate!r}; "
            "tokenizer.save_pretrained(FOLDER); data.tokenizer=FOLDER."
        )
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over tokenizer.json without padding and truncation, and over the BOS id.

    A tokenizer without tokenizer.json (a slow one) is known by its vocabulary.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content = {k: v for k, v in content.items() if k not in ("padding", "truncation")}
    else:
        content = tokenizer.get_vocab()
    canonical = json.dumps([content, tokenizer.bos_token_id], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
