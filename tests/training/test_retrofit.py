"""Retrofitting: the looped model against Transformers' own Llama with the same layers, and what is refused."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from hf_looped import LoopedConfig, LoopedForCausalLM
from training.config import resolve
from training.data import prepare
from training.loop import train
from training.retrofit import choose_layers, looped_config, looped_model, main, retrofit

LAYERS = 6
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0} | {
    "original_max_position_embeddings": 16
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "yarn-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "wide-heads": (LlamaConfig, LlamaForCausalLM, {"head_dim": 12, "num_key_value_heads": 4}),
    "gelu": (LlamaConfig, LlamaForCausalLM, {"hidden_act": "gelu"}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}
WHOLE = {"prelude": 1, "recurrent": 3, "coda": 2}


def pretrained(kind="llama", **fields):
    """A model whose every weight matters, gains included."""
    config_class, model_class, own = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**(SHAPE | own | fields)))
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 9
            parameter.add_(torch.randn_like(parameter) / fan_in**0.5)
    return model.eval()


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """A checkpoint with tokenizer and generation config."""
    folder = tmp_path_factory.mktemp("pretrained") / "llama"
    model = pretrained(bos_token_id=3, eos_token_id=[4, 5], pad_token_id=6)
    model.generation_config.eos_token_id = [4, 5, 7]
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w3", unk_token="w0")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    return folder


IDS = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))


def scored(model, ids=IDS, **kwargs):
    """Logits, loss and gradients by name."""
    output = model(ids, labels=ids, use_cache=False, **kwargs)
    output.loss.backward()
    return output.logits, output.loss, {n: p.grad for n, p in model.named_parameters()}


def keeping(llama, *layers):
    """The pretrained model with these layers alone, in this order; one may come twice."""
    kept = copy.deepcopy(llama)
    kept.model.layers = nn.ModuleList(kept.model.layers[layer] for layer in layers)
    kept.config.num_hidden_layers = len(layers)
    return kept


def assert_same_function_and_gradients(looped, llama, layers, **kwargs):
    """float32 through six layers, logits of size one: 1e-5, and 1e-5 of each gradient's norm."""
    expected, loss, theirs = scored(llama)
    actual, our_loss, ours = scored(looped, **kwargs)
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    sections = [(s, i) for s, kept in layers.items() for i in range(len(kept))]
    for number, (section, i) in enumerate(sections):
        for name in list(theirs):
            prefix = f"model.layers.{number}."
            if name.startswith(prefix):
                theirs[f"model.{section}.{i}.{name.removeprefix(prefix)}"] = theirs.pop(name)
    ours.pop("model.injection.proj.weight", None)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        assert gradient.norm() > 0


@pytest.mark.parametrize(
    ("kind", "injection"),
    [*((kind, "linear") for kind in KINDS), ("llama", "additive"), ("llama", "passthrough")],
)
def test_with_every_layer_kept_and_run_once_it_is_the_pretrained_model(kind, injection):
    llama = pretrained(kind)
    layers = choose_layers(LAYERS, **WHOLE)
    looped = looped_model(llama, layers, recurrences=1, injection=injection)
    assert_same_function_and_gradients(looped, llama, layers)


@pytest.mark.parametrize(
    ("start", "kept"), [(None, (0, 3, 4, 5)), (1, (0, 1, 2, 5)), (2, (0, 2, 3, 5))]
)
@pytest.mark.parametrize("injection", ["linear", "passthrough"])
def test_without_some_layers_it_is_the_pretrained_model_without_them(start, kept, injection):
    llama = pretrained()
    layers = choose_layers(LAYERS, prelude=1, recurrent=2, coda=1, start=start)
    looped = looped_model(llama, layers, recurrences=1, injection=injection)
    assert_same_function_and_gradients(looped, keeping(llama, *kept), layers)


def test_the_linear_injection_starts_from_the_kept_layers_whatever_r_is():
    """W = [I ‖ 0]: the same bits for every r. Its half that reads the state gets a gradient as soon as r > 1."""
    llama = pretrained()
    looped = looped_model(llama, choose_layers(LAYERS, 1, 2, 1), recurrences=3)
    expected, loss, _ = scored(keeping(llama, 0, 3, 4, 5))
    once = scored(looped, num_recurrences=1)[0]
    torch.testing.assert_close(once, expected, rtol=1e-5, atol=1e-5)
    for r in (2, 3, 5):
        looped.zero_grad()
        logits, _, gradients = scored(looped, num_recurrences=r)
        assert torch.equal(logits, once)
        of_state = gradients["model.injection.proj.weight"][:, 32:]
        assert of_state.norm() > 0.01 * gradients["model.injection.proj.weight"].norm()


def test_passthrough_runs_the_block_r_times_in_a_row():
    llama = pretrained()
    looped = looped_model(llama, choose_layers(LAYERS, 1, 2, 1), 3, injection="passthrough")
    expected, *_ = scored(keeping(llama, 0, *(3, 4) * 3, 5))
    actual, *_ = scored(looped)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_looped_model_has_weights_of_its_own():
    llama = pretrained()
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    looped = looped_model(llama, choose_layers(LAYERS, **WHOLE), recurrences=2)
    with torch.no_grad():
        for parameter in looped.parameters():
            parameter.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in llama.state_dict().items())


# Folders


def test_a_folder_holds_model_tokenizer_and_ids_and_decodes_as_the_pretrained_model(
    llama_folder, tmp_path
):
    result = retrofit(llama_folder, tmp_path / "new" / "looped", **WHOLE, recurrences=2)
    llama = AutoModelForCausalLM.from_pretrained(llama_folder)
    looped = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "looped")
    config = looped.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, [4, 5], 6)
    assert looped.generation_config.eos_token_id == [4, 5, 7]
    assert (config.num_recurrences, config.max_position_embeddings) == (2, 64)
    written = [
        model.generate(IDS[:, :5], max_new_tokens=12, do_sample=False, eos_token_id=None)
        for model in (llama, looped)
    ]
    assert torch.equal(*written)
    tokenizer, copied = (
        AutoTokenizer.from_pretrained(folder) for folder in (llama_folder, tmp_path / "new/looped")
    )
    assert copied("w9 w1 x")["input_ids"] == tokenizer("w9 w1 x")["input_ids"] == [9, 1, 0]
    assert copied.chat_template == tokenizer.chat_template
    assert copied.bos_token_id == 3
    assert result["parameters_before"] == sum(p.numel() for p in llama.parameters())
    assert result["parameters_after"] == sum(p.numel() for p in looped.parameters())
    assert result["layers"] == {
        "prelude": [0],
        "recurrent": [1, 2, 3],
        "coda": [4, 5],
        "dropped": [],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_keep_their_dtype_and_a_folder_without_tokenizer_gets_none(tmp_path, dtype):
    pretrained("tied").to(dtype).save_pretrained(tmp_path / "llama")
    retrofit(tmp_path / "llama", tmp_path / "looped", **WHOLE, recurrences=2)
    weights = load_file(tmp_path / "looped" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert "lm_head.weight" not in weights
    names = {path.name for path in (tmp_path / "looped").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_nothing_is_left_behind_by_a_disk_that_is_full(llama_folder, tmp_path, monkeypatch):
    def full(self, folder, **kwargs):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_looped.LoopedForCausalLM.save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        retrofit(llama_folder, tmp_path / "looped", **WHOLE, recurrences=2)
    assert not list(tmp_path.iterdir())


def test_the_command_prints_which_layer_went_where_and_the_parameters(
    llama_folder, tmp_path, capsys
):
    sizes = ["--prelude", "1", "--recurrent", "2", "--coda", "1", "--recurrences", "3"]
    out = tmp_path / "looped"
    assert main([str(llama_folder), "--out", str(out), *sizes]) == 0
    printed = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert {"prelude 0", "recurrent 3–4, run 3 times", "coda 5", "dropped 1–2"} <= set(rows)
    before, after = (
        sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
        for folder in (llama_folder, out)
    )
    assert {f"parameters before {before:,}", f"parameters after {after:,}"} <= set(rows)
    assert main([str(llama_folder), "--out", str(out), *sizes]) == 2
    assert "which exists. Name a new folder" in " ".join(capsys.readouterr().err.split())


# What is refused


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 4, 2), "prelude . recurrent . coda is 8 layers, but the model has 6. Take fewer"),
        ((1, 0, 2), "recurrent is 0: at least 1 layers"),
        ((-1, 2, 2), "prelude is -1: at least 0 layers"),
        ((1, 2, -2), "coda is -2: at least 0 layers"),
        (
            (2, 2, 1, 1),
            "start is 1: 2 recurrent layers between 2 of the prelude and 1 .* one of 2..3",
        ),
        ((1, 2, 1, 4), "start is 4: .* begin at one of 1..3"),
    ],
)
def test_sections_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        choose_layers(LAYERS, *sizes)


TINY = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen2Config(**TINY), "'qwen2', which has biases of queries.* only llama and mistral"),
        (Qwen3Config(**TINY), "'qwen3', which has gains in the norms of queries and keys"),
        (Gemma2Config(**TINY), "'gemma2', which has norms after attention and MLP"),
        (GPT2Config(), "model_type is 'gpt2': only llama and mistral"),
        (LlamaConfig(**TINY, attention_bias=True), "attention_bias is true.* no biases"),
        (LlamaConfig(**TINY, mlp_bias=True), "mlp_bias is true.* no biases"),
        (MistralConfig(**TINY, num_key_value_heads=2), "sliding_window is 4096.* Set it to null"),
        (LlamaConfig(**TINY, quantization_config={"bits": 4}), "quantised weights"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_with_what_the_looped_block_lacks_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        looped_config(config, choose_layers(2, 0, 1, 1), recurrences=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recurrences": 0}, "recurrences is 0: at least one"),
        (
            {"recurrences": 2, "injection": "hyperconnections"},
            "use one of linear, additive, passth",
        ),
        ({"recurrences": 2, "prelude": 9}, "is 14 layers, but the model has 6"),
    ],
)
def test_a_request_without_meaning_is_refused_before_weights_are_read(
    llama_folder, tmp_path, monkeypatch, fields, message
):
    monkeypatch.setattr("training.retrofit._read_model", lambda source: pytest.fail("read"))
    with pytest.raises(ValueError, match=message):
        retrofit(llama_folder, tmp_path / "looped", **(WHOLE | fields))
    assert not list(tmp_path.iterdir())


def broken(folder, what):
    """Break one thing of a checkpoint."""
    if what == "no config":
        (folder / "config.json").unlink()
    elif what == "config":
        (folder / "config.json").write_text("{")
    elif what == "no weights":
        (folder / "model.safetensors").unlink()
    elif what == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
    elif what == "sizes":
        config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 40}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        weights = load_file(folder / "model.safetensors")
        if what == "missing":
            del weights["model.layers.3.mlp.up_proj.weight"]
        else:
            weights["model.layers.3.self_attn.q_proj.bias"] = torch.zeros(32)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no config", "holds no config that Transformers can read"),
        ("config", "holds no config that Transformers can read"),
        ("no weights", "holds no weights that fit its config"),
        ("tokenizer", "holds a tokenizer that cannot be read"),
        ("sizes", "holds no weights that fit its config"),
        ("missing", "missing or unknown: model.layers.3.mlp.up_proj.weight. Check"),
        ("bias", "missing or unknown: model.layers.3.self_attn.q_proj.bias. Check"),
    ],
)
def test_a_broken_checkpoint_is_named(llama_folder, tmp_path, what, message):
    source = tmp_path / "llama"
    source.mkdir()
    for path in llama_folder.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    broken(source, what)
    with pytest.raises(ValueError, match=message):
        retrofit(source, tmp_path / "looped", **WHOLE, recurrences=2)
    assert not (tmp_path / "looped").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is no folder"):
        retrofit(tmp_path / "nowhere", tmp_path / "looped", **WHOLE, recurrences=2)


# Training on


def train_llama(folder, packed, steps=300, rows=8):
    """Train a Llama of six layers with AdamW on packed rows; save it with the tokenizer."""
    torch.manual_seed(0)
    own = {"vocab_size": len(packed.tokenizer), "bos_token_id": packed.bos_token_id}
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | own)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    order = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        chosen = torch.randint(len(packed.train), (rows,), generator=order)
        ids = torch.as_tensor(packed.train[chosen.numpy()]).long()
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    packed.tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_a_retrofitted_model_trained_on_is_ahead_of_the_same_model_from_scratch(
    recipe, recipe_fields, tmp_path
):
    """Two of six layers dropped, r = 2; 20 steps on the same rows. Each takes the better of two sets of rates, gentle
    ones and those for training from scratch; the difference must be more than a tenth of a nat, which no seed gives.
    """
    config = recipe("retrofitted")
    packed = prepare(config.data, config.data_folder, progress=False)
    train_llama(tmp_path / "llama", packed)
    sizes = {"prelude": 1, "recurrent": 2, "coda": 1, "recurrences": 2}
    retrofit(tmp_path / "llama", tmp_path / "looped", **sizes)
    torch.manual_seed(0)
    scratch = LoopedForCausalLM(LoopedConfig.from_pretrained(tmp_path / "looped"))
    scratch.save_pretrained(tmp_path / "scratch")
    packed.tokenizer.save_pretrained(tmp_path / "scratch")
    gentle = {"muonh_lr": 0.003, "embedding_lr": 0.001, "lm_head_lr": 0.001, "norm_lr": 0.001}
    rates = {"gentle": gentle, "large": {}}

    def loss(start, name):
        fields = {key: value for key, value in recipe_fields.items() if key != "model"}
        fields["optimizer"] = fields["optimizer"] | rates[name]
        fields["transfer"] = fields["transfer"] | {"reference_width": 32}
        fields["data"] = fields["data"] | {"tokenizer": str(tmp_path / "llama")}
        fields |= {"steps": 20, "out": str(tmp_path / "runs"), "run_id": f"{start}-{name}"}
        return train(resolve(fields | {"init_from": str(tmp_path / start)}))["val_loss"]

    best = {start: min(loss(start, name) for name in rates) for start in ("looped", "scratch")}
    assert best["looped"] < best["scratch"] - 0.1
