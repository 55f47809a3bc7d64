"""Models with random weights, three kinds of tokenizers, rows, and a scorer that shares nothing with ours."""

import json
import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from hf_looped import LoopedConfig, LoopedForCausalLM

WORDS = (
    "the river runs under a stone bridge and seven boats wait for rain while the miller counts "
    "sacks of flour how many apples are left Which city is the capital of France Paris Rome Oslo "
    "light travels faster than sound because water boils at high temperature 12 25 300"
).split()
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}


def _texts():
    generator = random.Random(0)
    return [" ".join(generator.choices(WORDS, k=12)) + ".\n" for _ in range(400)]


def _metaspace():
    """As SentencePiece: a mark for every space and one in front, bytes where nothing else fits."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.post_processor = _bos(tokenizer)
    return tokenizer


def _bytes(bos):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    if bos:
        tokenizer.post_processor = _bos(tokenizer)
    return tokenizer


def _bos(tokenizer):
    return processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


TOKENIZERS = {
    "metaspace": _metaspace,
    "bytes, BOS by post-processor": lambda: _bytes(True),
    "bytes, no post-processor": lambda: _bytes(False),
}


@pytest.fixture(scope="session", params=TOKENIZERS)
def tokenizer(request):
    return PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[request.param](), **SPECIAL)


@pytest.fixture(scope="session")
def byte_tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=_bytes(True), **SPECIAL)


def _wild(model, dtype=torch.float32):
    """Weights large enough for losses that differ from token to token."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model.to(dtype).eval()


def make_llama(vocab_size=512, dtype=torch.float32):
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    return _wild(LlamaForCausalLM(config), dtype)


def make_looped(vocab_size=512, recurrences=4, **options):
    set_seed(0)
    config = LoopedConfig.iso_depth(
        32,
        recurrences,
        effective_depth=6,
        shared_depth=4,
        head_dim=16,
        vocab_size=vocab_size,
        **options,
    )
    return _wild(LoopedForCausalLM(config))


@pytest.fixture(scope="session")
def llama():
    return make_llama()


@pytest.fixture(scope="session")
def looped():
    return make_looped()


def _sentence(generator, words):
    return " ".join(generator.choices(WORDS, k=words))


def make_rows(task, count=40, seed=1):
    """Rows in the form of a task's file."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        text = _sentence(generator, generator.randint(3, 15))
        if task == "arc_easy":
            stem = _sentence(generator, 2)
            choices = [f"{stem} {_sentence(generator, k)}" for k in (1, 2, 3, 1)]
            rows.append(
                {"query": f"Question: {text}?", "choices": choices, "gold": generator.randrange(4)}
            )
        else:
            answer = _sentence(generator, generator.randint(1, 4))
            rows.append({"context": f"Question: {text}?\nAnswer:", "continuation": answer})
    return rows


def write_rows(folder, task, rows):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / f"{task}.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Rows of an LM task with shots, one without, and a multiple-choice one, as prepare writes them."""
    from evaluation.prepare import prepare

    source = tmp_path_factory.mktemp("source")
    for task in ("svamp", "lambada_openai", "arc_easy"):
        write_rows(source, task, make_rows(task))
    out = tmp_path_factory.mktemp("data")
    prepare(out, ["svamp", "lambada_openai", "arc_easy"], source=source, partial=True)
    return out


def loaded(model, tokenizer, **options):
    """Our model for lm-eval, its remarks on models that are passed ready made left out."""
    from evaluation.lm import LoopedLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LoopedLM(model, tokenizer=tokenizer, **options)


# A direct computation: own shuffle, own shots, own prompts, one sequence at a time, all logits.


def direct_documents(path: Path, shots: int):
    """Prompts and answers of a file's rows."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(1337).shuffle(rows)
    rows = rows[:10_000]

    def asked(row):
        return f"{row['query']}\nAnswer:" if "query" in row else row["context"].rstrip()

    def gold(row):
        return row["choices"][row["gold"]] if "choices" in row else row["continuation"]

    out = []
    for index, row in enumerate(rows):
        others = [k for k in range(len(rows)) if k != index]
        picked = random.Random(1234 + index).sample(others, shots)
        for place, k in enumerate(picked):
            while asked(rows[k]) == asked(row):
                k = (k + 1) % len(rows)
            picked[place] = k
        parts = [f"{asked(rows[k])} {gold(rows[k])}" for k in picked]
        out.append(("\n\n".join([*parts, asked(row)]), row))
    return out


@torch.no_grad()
def direct_losses(model, tokenizer, prompt, answer, **options):
    """Nats of the tokens that the answer adds to the prompt, and their ids."""
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    whole = tokenizer(f"{prompt} {answer}", add_special_tokens=False)["input_ids"]
    scored = whole[len(before) :]
    ids = torch.tensor([[tokenizer.bos_token_id, *before, *scored]])
    logits = model(input_ids=ids, **options).logits[0].double()
    logs = logits.log_softmax(-1)
    first = len(before)
    losses = [-logs[first + k, token].item() for k, token in enumerate(scored)]
    greedy = [logs[first + k].argmax().item() == token for k, token in enumerate(scored)]
    return losses, scored, greedy


@pytest.fixture(scope="session")
def tools():
    """The functions above, for the tests."""
    return SimpleNamespace(
        loaded=loaded,
        make_llama=make_llama,
        make_looped=make_looped,
        make_rows=make_rows,
        write_rows=write_rows,
        documents=direct_documents,
        losses=direct_losses,
    )
