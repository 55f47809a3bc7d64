"""What the model refuses, shares, cuts and counts."""

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import PreTrainedTokenizerFast

from evaluation.lm import LoopedLM
from evaluation.scoring import Request, is_causal, score, takes_trees


def asked(*pairs):
    return [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=k)
        for k, pair in enumerate(pairs)
    ]


class Counting:
    """Logits of a model, and how many rows and positions it was asked for."""

    def __init__(self, model):
        self.model, self.rows, self.positions = model, 0, 0

    @torch.no_grad()
    def __call__(self, **inputs):
        self.rows += len(inputs["input_ids"])
        self.positions += inputs["input_ids"].numel()
        mask = inputs.get("attention_mask")
        if mask is not None:
            inputs["attention_mask"] = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        return self.model(**inputs, use_cache=False).logits


CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["llama", "looped"])
def test_choices_share_their_context_and_duplicates_are_scored_once(request, kind):
    logits = Counting(request.getfixturevalue(kind))
    context = tuple(range(5, 35))
    requests = [
        Request(context=context, continuation=part) for part in ((7, 8, 9), (7, 3), (4,), (7, 3))
    ]
    requests += [Request(context=tuple(range(50, 60)), continuation=(1, 2))] * 3
    together = score(logits, requests, batch_size=4, device=CPU, trees=True)
    assert logits.rows == 2
    assert logits.positions == (30 + 2 + 1) + 11  # a context once; last tokens are never read
    apart = score(logits, requests, batch_size=1, device=CPU, trees=False)
    for one, other in zip(together, apart, strict=True):
        assert one.greedy == other.greedy
        torch.testing.assert_close(
            torch.tensor(one.losses), torch.tensor(other.losses), atol=2e-6, rtol=1e-6
        )


def test_a_model_that_ignores_tree_masks_is_found_and_scored_row_by_row(llama):
    class Flat(Counting):
        def __call__(self, **inputs):
            inputs.pop("attention_mask", None)
            return super().__call__(**inputs)

    assert takes_trees(Counting(llama), 512, CPU)
    assert not takes_trees(Flat(llama), 512, CPU)


def test_a_model_that_looks_ahead_is_refused(llama, byte_tokenizer, tools):
    class Ahead(Counting):
        def __call__(self, **inputs):
            return super().__call__(**inputs) + inputs["input_ids"][:, -1:, None].float()

    assert is_causal(Counting(llama), 512, CPU)
    assert not is_causal(Ahead(llama), 512, CPU)
    model = tools.make_llama()
    forward = model.forward

    def ahead(input_ids, **options):
        out = forward(input_ids=input_ids, **options)
        out.logits = out.logits + input_ids[:, -1:, None].float()
        return out

    model.forward = ahead
    with pytest.raises(ValueError, match="later tokens change the logits of earlier ones"):
        tools.loaded(model, byte_tokenizer)


@pytest.mark.parametrize("length", [24, 40])
def test_long_prompts_are_cut_from_the_left_never_into_the_answer(
    tools, llama, byte_tokenizer, length
):
    lm = tools.loaded(llama, byte_tokenizer, max_length=length)
    prompt, answer = "the river runs under a stone bridge and seven boats wait " * 3, " for rain"
    (found,) = lm.loglikelihood(asked((prompt.strip(), answer)), disable_tqdm=True)
    ids = byte_tokenizer(prompt.strip() + answer, add_special_tokens=False)["input_ids"]
    kept = ids[-(length + 1) :]
    assert found.truncated
    logits = llama(input_ids=torch.tensor([kept[:-1]])).logits[0].double().log_softmax(-1)
    many = len(found.tokens)
    expected = [-logits[k - 1, kept[k]].item() for k in range(len(kept) - many, len(kept))]
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected), atol=2e-6, rtol=1e-6
    )
    (short,) = lm.loglikelihood(asked(("the", " river")), disable_tqdm=True)
    assert not short.truncated


def test_an_answer_longer_than_the_model_is_refused(tools, llama, byte_tokenizer):
    lm = tools.loaded(llama, byte_tokenizer, max_length=4)
    with pytest.raises(ValueError, match="does not fit into max_length = 4"):
        lm.loglikelihood(asked(("the", " " + "xyz " * 9)), disable_tqdm=True)


def test_a_token_that_spans_prompt_and_answer_is_counted_and_scored_by_the_harness_rule(
    tools, llama, byte_tokenizer
):
    """A joint within a word: the context alone has other tokens than the text begins with."""
    lm = tools.loaded(llama, byte_tokenizer)
    text = "stone bridge and"
    whole = byte_tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = {
        k: byte_tokenizer(text[:k], add_special_tokens=False)["input_ids"] for k in range(1, 12)
    }
    joint, before = next(
        (k, ids) for k, ids in parts.items() if whole[: len(ids)] != ids and len(ids) < len(whole)
    )
    (found,) = lm.loglikelihood(asked((text[:joint], text[joint:])), disable_tqdm=True)
    assert found.merged and list(found.tokens) == whole[len(before) :]
    (fine,) = lm.loglikelihood(asked(("stone", " bridge")), disable_tqdm=True)
    assert not fine.merged


def test_an_answer_that_leaves_no_token_is_named(tools, llama, byte_tokenizer):
    whole = byte_tokenizer("bridge", add_special_tokens=False)["input_ids"]
    start = next(
        k for k in range(1, 6)
        if len(byte_tokenizer("bridge"[:k], add_special_tokens=False)["input_ids"]) >= len(whole)
    )  # fmt: skip
    lm = tools.loaded(llama, byte_tokenizer)
    with pytest.raises(ValueError, match="leaves nothing to score of the continuation"):
        lm.loglikelihood(asked(("bridge"[:start], "bridge"[start:])), disable_tqdm=True)


def test_bos_stands_in_front_once(tools, llama, tokenizer):
    lm = tools.loaded(llama, tokenizer)
    bos = tokenizer.bos_token_id
    for text in ("the river?", "<s>the river?"):
        ((context, _, _),) = lm._encoded([(text, " runs")])
        assert context[0] == bos and context[1:2] != [bos]
    bare = tools.loaded(llama, tokenizer, add_bos_token=False)
    ((context, _, _),) = bare._encoded([("the river?", " runs")])
    assert context[0] != bos
    ((context, _, _),) = bare._encoded([("", "runs")])
    assert context == [bos]  # a prompt needs a token


def test_a_tokenizer_without_bos_is_refused(tools, llama, byte_tokenizer):
    bare = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer.backend_tokenizer, eos_token="</s>", pad_token="</s>"
    )
    with pytest.raises(ValueError, match="no BOS token.*add_bos_token=False"):
        tools.loaded(llama, bare)
    assert tools.loaded(llama, bare, add_bos_token=False).prefix_token_id == bare.eos_token_id


def test_a_checkpoint_without_tokenizer_is_named(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer could be loaded.*save_pretrained"):
        LoopedLM(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["no/such/folder/here", "/nowhere"])
def test_a_model_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match=f"{name}: no causal LM could be loaded.*save_pretrained"):
        LoopedLM(name, device="cpu")


def test_recurrences_of_a_model_without_a_loop_are_refused(tools, llama, byte_tokenizer):
    with pytest.raises(ValueError, match="num_recurrences is 2, but LlamaForCausalLM has no loop"):
        tools.loaded(llama, byte_tokenizer, num_recurrences=2)


@pytest.mark.parametrize("value", [0, "auto", "-1"])
def test_a_batch_size_that_is_none_is_refused(tools, llama, byte_tokenizer, value):
    with pytest.raises(ValueError, match="batch_size is .* whole number"):
        tools.loaded(llama, byte_tokenizer, batch_size=value)
