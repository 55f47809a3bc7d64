"""samples.md: what a model writes after the first tokens of validation rows."""

import re

import numpy as np
import pytest
import torch

from hf_looped import LoopedConfig, LoopedForCausalLM
from training.samples import continue_greedily, write_samples
from training.tokenizer import train_tokenizer

T = 32


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the state reads the prelude again. " * 20], 290)


def make_model(**fields):
    """Width 16; weights of the head large enough that no two logits are close."""
    fields = {"vocab_size": 320, "max_position_embeddings": T} | fields
    config = LoopedConfig.iso_depth(
        16, 2, effective_depth=4, shared_depth=2, head_dim=8, bos_token_id=0, **fields
    )
    torch.manual_seed(0)
    model = LoopedForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight)
    return model.eval()


def make_rows(tokenizer, n=3, length=T + 1):
    rows = np.random.default_rng(0).integers(1, len(tokenizer), (n, length)).astype(np.int32)
    rows[:, 0] = tokenizer.bos_token_id
    return rows


@torch.no_grad()
def argmax_loop(model, prompt, new_tokens, vocabulary):
    """The whole text anew for every token, without cache."""
    tokens = [int(token) for token in prompt]
    for _ in range(new_tokens):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1, :vocabulary].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"injection": "hyperconnections"},
        {"injection": "additive", "state_init": "normal"},
        {"num_backprop_recurrences": 1},
    ],
)
def test_continuations_are_those_of_an_argmax_loop_without_cache(fields, tokenizer):
    model = make_model(**fields)
    for prompt in make_rows(tokenizer)[:, :12]:
        found = continue_greedily(model, prompt, 20, len(tokenizer)).tolist()
        assert found == argmax_loop(model, prompt, 20, len(tokenizer))


def test_only_tokens_that_the_tokenizer_has_are_written(tokenizer):
    """The model's vocabulary is rounded up; here it wants one of the surplus entries each time."""
    model = make_model()
    assert len(tokenizer) < 320
    torch.nn.init.constant_(model.lm_head.weight, 0.0)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.lm_head.weight.requires_grad_(False)
    surplus = torch.zeros(320)
    surplus[-1], surplus[7] = 2.0, 1.0
    model.lm_head.register_forward_hook(lambda *_: surplus.expand(1, 1, 320))
    assert continue_greedily(model, np.arange(4), 5, len(tokenizer)).tolist() == [7] * 5


def sections(text):
    """Prompt, model's and true continuation of each sample, taken out of their fences."""
    found = re.findall(r"^(Prompt|Model|Text):\n\n(`{3,})\n(.*?)\n\2$", text, re.M | re.S)
    return [tuple(part for _, _, part in found[i : i + 3]) for i in range(0, len(found), 3)]


def test_the_file_holds_prompt_continuation_and_truth_of_each_row(tokenizer, tmp_path):
    model, text = make_model(max_position_embeddings=128), "a looped model reads. " * 20
    tokens = tokenizer.encode(text)[:81]
    assert len(tokens) == 81
    rows = np.array([tokens, tokens[::-1]], dtype=np.int32)
    write_samples(model, tokenizer, rows, tmp_path / "samples.md")
    found = sections((tmp_path / "samples.md").read_text())
    assert len(found) == 2
    for row, parts in zip(rows, found, strict=True):
        continued = argmax_loop(model, row[:32], 48, len(tokenizer))
        for part, ids in zip(parts, (row[:32], continued, row[32:80]), strict=True):
            shown = tokenizer.decode(list(ids), skip_special_tokens=True)
            printable = "".join(c if c.isprintable() or c == "\n" else "" for c in shown)
            assert re.sub(r"\\x..|\\[tr]|\\u....", "", part) == printable
    assert text.startswith(found[0][0])  # without the BOS of the row
    assert (tmp_path / "samples.md").read_text().count("continued by 48") == 1


def test_backticks_and_control_characters_do_not_break_the_page(tokenizer, tmp_path):
    text = "# Model\n```\nx = `a`\n`````\n\x1b[31m\x00\tred\u202e\r\n"
    tokens = tokenizer.encode(text)
    row = np.array([tokens + tokens], dtype=np.int32)
    model = make_model(max_position_embeddings=256)
    write_samples(model, tokenizer, row, tmp_path / "s.md", len(tokens), len(tokens))
    (found,) = sections((tmp_path / "s.md").read_text())
    expected = "# Model\n```\nx = `a`\n`````\n\\x1b[31m\\x00\\tred\\u202e\\r\n"
    assert found[0] == found[2] == expected


@pytest.mark.parametrize(
    ("length", "positions", "sizes"),
    [(33, 32, (12, 20)), (33, 2048, (13, 20)), (81, 32, (12, 20)), (3, 2, (1, 1))],
)
def test_prompt_and_continuation_shrink_to_the_context(
    length, positions, sizes, tokenizer, tmp_path
):
    """32 + 48 tokens don't fit: two fifths of what there is are the prompt, rounded down."""
    model = make_model(max_position_embeddings=positions)
    rows = make_rows(tokenizer, 1, length)
    seen = []

    def note(module, arguments, named):
        assert not module.training and not torch.is_grad_enabled()
        seen.append(named["input_ids"].shape[1])

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    write_samples(model, tokenizer, rows, tmp_path / "samples.md")
    text = (tmp_path / "samples.md").read_text()
    assert f"{sizes[0]} tokens continued by {sizes[1]}" in text
    assert seen == [sizes[0]] + [1] * (sizes[1] - 1) and sum(seen) <= positions


def test_a_sample_does_not_depend_on_the_rows_beside_it(tokenizer, tmp_path):
    model, rows = make_model(), make_rows(tokenizer, 4)
    files = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2]):
        write_samples(model, tokenizer, rows[order], tmp_path / "samples.md")
        files.append(sections((tmp_path / "samples.md").read_text()))
    assert files[1] == files[0][::-1] and files[2] == [files[0][2]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_and_the_random_state_are_left_as_they_were(
    training, dtype, tokenizer, tmp_path, capfd
):
    model = make_model(injection="additive", state_init="normal").to(dtype).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    write_samples(model, tokenizer, make_rows(tokenizer, 1), tmp_path / "samples.md", 4, 4)
    assert model.training == model.model.recurrent[0].training == training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert capfd.readouterr() == ("", "")  # no warning of the library either


def test_an_error_leaves_the_old_file_and_the_model_in_training(tokenizer, tmp_path):
    model = make_model().train()
    (tmp_path / "samples.md").write_text("old")
    rows = make_rows(tokenizer, 1)
    rows[0, 3] = 10_000  # no such token
    with pytest.raises(ValueError, match="input_ids holds"):
        write_samples(model, tokenizer, rows, tmp_path / "samples.md")
    assert [path.name for path in tmp_path.iterdir()] == ["samples.md"]
    assert (tmp_path / "samples.md").read_text() == "old" and model.training
