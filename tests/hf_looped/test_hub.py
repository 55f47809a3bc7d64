"""Exports that load without the package, uploads to a Hub made of folders, and checkpoints of the reference code."""

import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_looped import LoopedConfig, LoopedForCausalLM, LoopedModel, hub

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "reference"
INJECTIONS = ["linear", "additive", "passthrough", "diagonal", "hyperconnections"]
each_injection = pytest.mark.parametrize("injection", INJECTIONS)
CODE = {"configuration_looped.py", "modeling_looped.py"}
ROUNDING = {"rtol": 0, "atol": 1e-4}  # float32 logits up to 15 after some ten layers


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1")


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def python_files(folder):
    return {file.name for file in folder.glob("*.py")}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# Exports, loaded by a Python that has no hf_looped

LAST = "tied_export"  # the one for what is done once

FOREIGN = """
import sys
from pathlib import Path
sys.modules["hf_looped"] = None  # however it may be installed
try:
    import hf_looped
except ImportError:
    pass
else:
    raise AssertionError("hf_looped can be imported")
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

folder, last, repository = Path(sys.argv[1]), *sys.argv[2:]
trust = {"trust_remote_code": True}
ids = torch.load(folder / "ids.pt")
results = {}
for export in sorted(folder.glob("*_export")):
    torch.manual_seed(99)
    model = AutoModelForCausalLM.from_pretrained(export, **trust)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        results[export.name] = {
            "weights": model.state_dict(),
            "config": AutoConfig.from_pretrained(export, **trust).to_dict(),
            "logits": model(ids, use_cache=False).logits,
            "tokens": model.generate(
                ids, max_new_tokens=5, do_sample=False, num_recurrences=2, pad_token_id=1
            ),
            "hidden": AutoModel.from_pretrained(export, **trust)(ids).last_hidden_state,
        }
assert export.name == last, export
results["modules"] = [
    name.rpartition(".")[2]
    for name in sys.modules
    if name.startswith(f"transformers_modules.{last}.") and name.count(".") == 3
]
tokenizer = AutoTokenizer.from_pretrained(export, **trust)
results["words"] = tokenizer("w3 w63 w7")["input_ids"]
write = pipeline("text-generation", model=str(export), **trust)
results["text"] = write("w3 w63", max_new_tokens=2, do_sample=False)[0]["generated_text"]

model.save_pretrained(folder / "saved-by-transformers")
del sys.modules["hf_looped"]
sys.path.insert(0, repository)
from hf_looped import hub
hub.export(model, tokenizer, folder / "exported-again")
torch.save(results, folder / "results.pt")
"""


def foreign_python(folder, script, *arguments):
    """Run a script where neither the repository nor a cache of this machine's user is in reach."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "HF_HOME": str(folder / "home"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums in the same order as here
    }
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", script, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def foreign(tiny_model, tokenizer, tmp_path_factory):
    """Models, the folder with their exports, and what a Python without the package made of those."""
    folder = tmp_path_factory.mktemp("foreign")
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.save(ids, folder / "ids.pt")
    made = {name: tiny_model(injection=name) for name in INJECTIONS}
    made["tied"] = tiny_model(tie_word_embeddings=True)
    made["llama-like"] = tiny_model(
        **dict.fromkeys(("qk_norm", "embedding_norm", "recurrent_norm"), False),
        gated_mlp=True,
        residual_multiplier=0.25,
    )
    for injection in INJECTIONS:
        sentinels = tiny_model(injection=injection)
        with torch.no_grad():
            for number, parameter in enumerate(sentinels.parameters()):
                parameter.fill_(1000 + number)
        made[f"{injection}-sentinels"] = sentinels
    for name, model in made.items():
        hub.export(model, tokenizer, folder / f"{name}_export")
    foreign_python(folder, FOREIGN, folder, LAST, ROOT)
    return SimpleNamespace(
        models=made, folder=folder, ids=ids, results=torch.load(folder / "results.pt")
    )


@pytest.mark.parametrize("name", [*INJECTIONS, "tied", "llama-like"])
def test_an_export_gives_the_same_logits_and_tokens_where_hf_looped_is_not_installed(foreign, name):
    model, loaded = foreign.models[name], foreign.results[f"{name}_export"]
    assert torch.equal(loaded["logits"], logits(model, foreign.ids))
    generation = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
    one, two = (model.generate(foreign.ids, num_recurrences=r, **generation) for r in (1, 2))
    assert torch.equal(loaded["tokens"], two)
    assert not torch.equal(one, two)  # so that num_recurrences is seen to arrive
    with torch.no_grad():
        expected = model.model(foreign.ids).last_hidden_state
    assert torch.equal(loaded["hidden"], expected)  # AutoModel on a folder with an LM head


@pytest.mark.parametrize(
    "name", [*INJECTIONS, *(f"{i}-sentinels" for i in INJECTIONS), "tied", "llama-like"]
)
def test_every_tensor_of_an_export_loads_where_hf_looped_is_not_installed(foreign, name):
    """The sentinels are numbers that no initialisation would give."""
    expected, weights = (
        foreign.models[name].state_dict(),
        foreign.results[f"{name}_export"]["weights"],
    )
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


@each_injection
def test_the_config_of_an_export_is_the_models_and_names_its_code(foreign, injection):
    loaded = foreign.results[f"{injection}_export"]["config"]
    expected = foreign.models[injection].config.to_dict()
    ignored = {"auto_map", "_name_or_path"}
    assert {k: v for k, v in loaded.items() if k not in ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }
    for reference in config_of(foreign.folder / f"{injection}_export")["auto_map"].values():
        module, name = reference.split(".")
        source = (foreign.folder / f"{injection}_export" / f"{module}.py").read_text()
        assert f"class {name}(" in source


def test_the_tokenizer_of_an_export_and_a_pipeline_work_where_hf_looped_is_not_installed(foreign):
    assert foreign.results["words"] == [3, 63, 7]
    assert re.fullmatch(r"w3 w63.*w\d+", foreign.results["text"])


def test_an_export_holds_the_code_that_the_model_imports_and_no_more(foreign):
    """The referee: modules that the other Python has imported from one export."""
    needed = {f"{name}.py" for name in foreign.results["modules"]}
    assert python_files(foreign.folder / LAST) == needed >= CODE


def test_a_model_loaded_with_an_exports_own_code_is_exported_with_that_code(foreign):
    """By Transformers' save_pretrained too, which writes neither tokenizer nor card."""
    first = foreign.folder / LAST
    for again in ("exported-again", "saved-by-transformers"):
        folder = foreign.folder / again
        assert python_files(folder) == python_files(first) >= CODE
        for file in python_files(first):
            assert (folder / file).read_bytes() == (first / file).read_bytes()
        assert config_of(folder)["auto_map"] == config_of(first)["auto_map"]
    weights = AutoModelForCausalLM.from_pretrained(foreign.folder / "exported-again").state_dict()
    expected = foreign.models["tied"].state_dict()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    tokenizer = AutoTokenizer.from_pretrained(foreign.folder / "exported-again")
    assert tokenizer("w5")["input_ids"] == [5]


# Exports, in a Python that has the package


@pytest.mark.parametrize("flag", [{}, {"trust_remote_code": True}])
def test_an_export_loads_as_the_packages_classes_where_it_is_imported(
    tiny_model, tokens, tmp_path, flag
):
    model = tiny_model()
    hub.export(model, None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **flag)
    assert type(loaded) is LoopedForCausalLM and type(loaded.config) is LoopedConfig
    assert type(AutoModel.from_pretrained(tmp_path, **flag)) is LoopedModel
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    hub.export(loaded, None, tmp_path / "again")
    assert config_of(tmp_path / "again") == config_of(tmp_path)
    assert python_files(tmp_path / "again") == python_files(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))
    again.save_pretrained(tmp_path / "plain")  # has no code, and must not name any
    assert "auto_map" not in config_of(tmp_path / "plain")
    assert not python_files(tmp_path / "plain")


def test_save_pretrained_copies_no_code_before_or_after_an_export(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "before")
    config, attributes = model.config.to_dict(), set(vars(model.config)) | set(vars(model))
    classes = [dict(vars(cls)) for cls in (LoopedConfig, LoopedModel, LoopedForCausalLM)]
    hub.export(model, None, tmp_path / "export")
    assert model.config.to_dict() == config
    assert set(vars(model.config)) | set(vars(model)) == attributes
    assert classes == [dict(vars(cls)) for cls in (LoopedConfig, LoopedModel, LoopedForCausalLM)]
    model.save_pretrained(tmp_path / "after")
    tiny_model().save_pretrained(tmp_path / "another")
    files = {file.name for file in (tmp_path / "before").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    for folder in ("after", "another"):
        assert {file.name for file in (tmp_path / folder).iterdir()} == files
        assert config_of(tmp_path / folder) == config_of(tmp_path / "before")
    assert "auto_map" not in config_of(tmp_path / "before")


def test_an_export_overwrites_a_former_one_and_leaves_other_files(
    tiny_model, tokenizer, tokens, tmp_path
):
    hub.export(tiny_model(seed=1), tokenizer, tmp_path)
    (tmp_path / "modeling_looped.py").write_text("of an older version")
    (tmp_path / "notes.txt").write_text("kept")
    model = tiny_model(injection="additive")
    hub.export(model, None, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "kept"
    assert "class LoopedForCausalLM(" in (tmp_path / "modeling_looped.py").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


def test_the_generation_config_is_exported(tiny_model, tmp_path):
    model = tiny_model()
    model.generation_config.max_new_tokens = 17
    hub.export(model, None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.max_new_tokens == 17


class Subclass(LoopedForCausalLM):
    pass


@pytest.mark.parametrize("kind", ["base", "subclass", "wrapped", "other"])
def test_a_model_of_another_class_is_refused_before_anything_is_written(tiny_model, tmp_path, kind):
    model = tiny_model()
    if kind == "other":
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
        wrong = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    else:
        wrong = {
            "base": model.model,
            "subclass": Subclass(model.config),
            "wrapped": torch.nn.DataParallel(model),
        }[kind]
    with pytest.raises(TypeError, match=f"model is a .*{type(wrong).__name__}, but only a Looped"):
        hub.export(wrong, None, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # inside PEFT's own calls
def test_a_model_with_adapters_is_refused_until_they_are_merged(tiny_model, tokens, tmp_path):
    peft = pytest.importorskip("peft")
    model = tiny_model()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match=r"PeftModel.*merge_and_unload\(\)"):
        hub.export(adapted, None, tmp_path)
    with pytest.raises(ValueError, match=r"PEFT adapters.*merge_and_unload\(\)"):
        hub.export(model, None, tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    merged = adapted.merge_and_unload()
    hub.export(merged, None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, tokens()), logits(merged, tokens()))


# The card


def test_the_minimal_card_has_metadata_that_survives_yaml_and_no_licence(tiny_model, tmp_path):
    model = tiny_model()
    hub.export(model, None, tmp_path)
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["looped", "depth-recurrent"],
    }
    assert ModelCardData(**yaml.safe_load(data.to_yaml())).to_dict() == data.to_dict()
    text = (tmp_path / "README.md").read_text()
    count = sum(p.numel() for p in model.parameters())
    assert f"{count:,} parameters: 1 prelude layers, 2 shared layers run r = 3 times" in text


def test_the_code_of_the_minimal_card_runs(tiny_model, tokens, tmp_path):
    hub.export(tiny_model(), None, tmp_path)
    text = (tmp_path / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {"input_ids": tokens()}
    exec(code.replace("path/or/repository", str(tmp_path)), names)
    assert torch.equal(names["tokens"][:, :12], tokens()) and names["tokens"].shape[1] > 12


def test_a_card_that_exists_is_kept_and_takes_a_licence(tiny_model, tmp_path):
    own = "---\ntags:\n- mine\n---\n\n# My model\n"
    (tmp_path / "README.md").write_text(own)
    hub.export(tiny_model(), None, tmp_path)
    assert (tmp_path / "README.md").read_text() == own
    hub.export(tiny_model(), None, tmp_path, license="apache-2.0")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {"tags": ["mine"], "license": "apache-2.0"}
    assert "# My model" in card.text


def test_a_card_that_is_given_replaces_the_one_there(tiny_model, tmp_path):
    for card in ("# Text\n", ModelCard("---\nlicense: mit\n---\n# Card\n")):
        hub.export(tiny_model(), None, tmp_path, card=card)
        assert (tmp_path / "README.md").read_text() == str(card)


# The Hub, as a folder


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """HfApi whose calls must fit the real signatures, and which keeps one repository as the folder `remote`."""
    remote = tmp_path / "remote"
    api = create_autospec(HfApi, instance=True)

    def create_repo(repo_id, **kwargs):
        remote.mkdir(exist_ok=kwargs["exist_ok"])
        return SimpleNamespace(repo_id=f"owner/{repo_id}")

    def hf_hub_download(repo_id, filename, *, local_dir, **kwargs):
        shutil.copy(remote / filename, local_dir)

    def upload_folder(*, folder_path, **kwargs):
        shutil.copytree(folder_path, remote, dirs_exist_ok=True)
        return "the commit"

    api.create_repo.side_effect = create_repo
    api.file_exists.side_effect = lambda repo_id, filename, **kwargs: (remote / filename).exists()
    api.hf_hub_download.side_effect = hf_hub_download
    api.upload_folder.side_effect = upload_folder
    opened = create_autospec(HfApi, return_value=api)
    monkeypatch.setattr(hub, "HfApi", opened)
    return SimpleNamespace(api=api, opened=opened, remote=remote)


def test_a_pushed_model_loads_from_the_repository(fake_hub, tiny_model, tokenizer, tokens):
    model = tiny_model()
    commit = hub.push_to_hub(
        model, tokenizer, "looped", private=True, token="hf_x", revision="dev", license="mit"
    )
    assert commit == "the commit"
    fake_hub.opened.assert_called_once_with(token="hf_x")
    fake_hub.api.create_repo.assert_called_once_with("looped", private=True, exist_ok=True)
    fake_hub.api.create_branch.assert_called_once_with("owner/looped", branch="dev", exist_ok=True)
    sent = fake_hub.api.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["revision"]) == ("owner/looped", "dev")
    assert not Path(sent["folder_path"]).exists()  # temporary
    assert ModelCard.load(fake_hub.remote / "README.md").data.license == "mit"
    assert python_files(fake_hub.remote) >= CODE
    loaded = AutoModelForCausalLM.from_pretrained(fake_hub.remote)
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    assert AutoTokenizer.from_pretrained(fake_hub.remote)("w5")["input_ids"] == [5]


def test_pushing_keeps_the_repositorys_card_unless_one_is_given(fake_hub, tiny_model):
    fake_hub.remote.mkdir()
    (fake_hub.remote / "README.md").write_text("# Mine\n")
    hub.push_to_hub(tiny_model(), None, "looped")
    assert (fake_hub.remote / "README.md").read_text() == "# Mine\n"
    fake_hub.api.create_branch.assert_not_called()
    hub.push_to_hub(tiny_model(), None, "looped", card="# New\n")
    assert (fake_hub.remote / "README.md").read_text() == "# New\n"


def test_nothing_is_sent_for_a_model_that_is_refused(fake_hub, tiny_model):
    with pytest.raises(TypeError, match="LoopedModel"):
        hub.push_to_hub(tiny_model().model, None, "looped")
    fake_hub.api.create_repo.assert_not_called()


# Checkpoints of the reference code. The forward below works on its names, its rotation by −θ and its padded
# vocabulary, and shares no code with the model.

V, D, HEADS = 37, 32, 4
KV_HEADS = 2
SIZE = D // HEADS
OPTIONS = {
    "sequence_len": 48,
    "vocab_size": V,
    "size": 1,
    "n_head": HEADS,
    "n_kv_head": KV_HEADS,
    "n_embd": D,
    "n_prelude": 1,
    "n_recur_block": 2,
    "n_coda": 1,
    "num_recur": 3,
    "bptt_k": None,
    "input_injection": "inject_init_prelude",
    "num_lanes": 3,
    "logit_softcap": 15.0,
}
REFERENCE_INJECTIONS = {
    "inject_init_prelude": "linear",
    "additive": "additive",
    "passthrough": "passthrough",
    "hyperconnect": "hyperconnections",
}


def reference_weights(options, dtype=torch.float32):
    """Random weights under the reference's names; the embedding in bfloat16, rows padded to 64."""
    d, r, lanes = options["n_embd"], options["num_recur"], options["num_lanes"]
    kv = d * options["n_kv_head"] // options["n_head"]
    rows = math.ceil(options["vocab_size"] / 64) * 64
    shapes = {"lm_head": (rows, d), "norm_emb": (d,), "norm_recur": (d,), "norm_final": (d,)}
    for section, key in (("prelude", "n_prelude"), ("recur", "n_recur_block"), ("coda", "n_coda")):
        for i in range(options[key]):
            shapes |= {
                f"transformer.{section}.{i}.{name}": shape
                for name, shape in {
                    "attn.c_q": (d, d),
                    "attn.c_k": (kv, d),
                    "attn.c_v": (kv, d),
                    "attn.c_proj": (d, d),
                    "mlp.c_fc": (4 * d, d),
                    "mlp.c_proj": (d, 4 * d),
                    "n1": (d,),
                    "n3": (d,),
                }.items()
            }
    if options["input_injection"] == "inject_init_prelude":
        shapes["inject"] = (d, 2 * d)
    random = torch.Generator().manual_seed(1)
    weights = {"transformer.wte.weight": torch.randn(rows, d, generator=random).bfloat16()}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=random)
        gain = len(shape) == 1
        weights[f"{name}.weight"] = 1 + 0.2 * weight if gain else weight / math.sqrt(shape[-1])
    if options["input_injection"] == "hyperconnect":
        for name, shape in {"alpha": (), "mixing": (lanes,), "beta": ()}.items():
            weights[f"lane_{name}"] = torch.randn(r, *shape, lanes, generator=random) / 2
    weights["lm_head.weight"] *= 4  # logits of the size of a trained model's
    return weights


def reference_logits(weights, options, row):
    """Logits [T, vocab_size] of one row of tokens, in float64."""
    w = {name.removesuffix(".weight"): weight.double() for name, weight in weights.items()}
    half, length = SIZE // 2, len(row)
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos(), angles.sin()
    later = torch.ones(length, length).triu(1).bool()

    def norm(x, gain=1.0):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def turned(x):  # by −θ
        a, b = x[:, :half], x[:, half:]
        return norm(torch.cat((a * cos + b * sin, b * cos - a * sin), dim=1))

    def block(x, name):
        y = norm(x, w[f"{name}.n1"])
        q, k, v = (y @ w[f"{name}.attn.c_{part}"].T for part in "qkv")
        outputs = []
        for head in range(HEADS):
            own = slice(head * SIZE, (head + 1) * SIZE)
            group = head // (HEADS // KV_HEADS)
            shared = slice(group * SIZE, (group + 1) * SIZE)
            scores = turned(q[:, own]) @ turned(k[:, shared]).T / math.sqrt(SIZE)
            outputs.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v[:, shared])
        x = x + torch.cat(outputs, dim=1) @ w[f"{name}.attn.c_proj"].T
        up = norm(x, w[f"{name}.n3"]) @ w[f"{name}.mlp.c_fc"].T
        return x + up.clamp(min=0).square() @ w[f"{name}.mlp.c_proj"].T

    def run(x, section, layers):
        for i in range(layers):
            x = block(x, f"transformer.{section}.{i}")
        return x

    kind, layers = options["input_injection"], options["n_recur_block"]
    e = run(norm(w["transformer.wte"][row], w["norm_emb"]), "prelude", options["n_prelude"])
    h = torch.zeros_like(e) if kind == "additive" else e
    lanes = torch.stack([e] * options["num_lanes"])
    for t in range(options["num_recur"]):
        if kind == "inject_init_prelude":
            u = torch.cat((e, h), dim=1) @ w["inject"].T
        elif kind == "hyperconnect":
            u = torch.tensordot(w["lane_alpha"][t], lanes, dims=1)
        else:
            u = h + e if kind == "additive" else h
        h = norm(run(u, "recur", layers), w["norm_recur"])
        if kind == "hyperconnect":
            lanes = torch.tensordot(w["lane_mixing"][t], lanes, dims=1)
            lanes = lanes + w["lane_beta"][t][:, None, None] * h
    x = run(lanes.sum(0) if kind == "hyperconnect" else h, "coda", options["n_coda"])
    raw = norm(x, w["norm_final"]) @ w["lm_head"].T
    cap = options["logit_softcap"]
    return (cap * torch.tanh(raw / cap))[:, : options["vocab_size"]]


def write_reference(folder, options, weights, name="000123"):
    folder.mkdir(exist_ok=True)
    torch.save(weights, folder / f"model_{name}.pt")
    (folder / f"meta_{name}.json").write_text(json.dumps({"step": 123, "model_config": options}))
    return folder / f"model_{name}.pt"


@pytest.mark.parametrize("kind", REFERENCE_INJECTIONS)
def test_a_converted_checkpoint_gives_the_logits_and_loss_of_the_reference(tmp_path, kind):
    """With two heads a key/value head, a padded vocabulary and a bfloat16 embedding."""
    options = OPTIONS | {"input_injection": kind}
    weights = reference_weights(options)
    model = hub.convert_reference(write_reference(tmp_path, options, weights))
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.injection == REFERENCE_INJECTIONS[kind]
    assert model.config.max_position_embeddings == 48
    rows = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = torch.stack([reference_logits(weights, options, row) for row in rows])
    assert expected.std() > 1  # the logits differ by far more than the tolerance
    with torch.no_grad():
        output = model(rows, labels=rows, use_cache=False)
    assert output.logits.shape == (2, 12, V)
    torch.testing.assert_close(output.logits.double(), expected, **ROUNDING)
    scores = expected.log_softmax(-1)[:, :-1].gather(2, rows[:, 1:, None])
    assert output.loss.item() == pytest.approx(-scores.mean().item(), abs=1e-5)


def test_a_converted_checkpoint_can_be_exported(tmp_path):
    weights = reference_weights(OPTIONS)
    model = hub.convert_reference(write_reference(tmp_path, OPTIONS, weights))
    hub.export(model, None, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    row = torch.arange(10)
    expected = reference_logits(weights, OPTIONS, row)
    torch.testing.assert_close(logits(loaded, row[None])[0].double(), expected, **ROUNDING)


def theirs(name):
    """A parameter's name in the reference, written a second time."""
    name = re.sub(r"^model\.(prelude|recurrent|coda)\.", r"transformer.\1.", name)
    for pattern, replacement in (
        (r"\.recurrent\.", ".recur."),
        (r"self_attn\.([qkv])_proj", r"attn.c_\1"),
        (r"self_attn\.o_proj", "attn.c_proj"),
        (r"mlp\.up_proj", "mlp.c_fc"),
        (r"mlp\.down_proj", "mlp.c_proj"),
        (r"input_layernorm", "n1"),
        (r"post_attention_layernorm", "n3"),
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.embed_norm", "norm_emb"),
        (r"^model\.recurrent_norm", "norm_recur"),
        (r"^model\.norm", "norm_final"),
        (r"^model\.injection\.proj", "inject"),
        (r"^model\.injection\.", "lane_"),
    ):
        name = re.sub(pattern, replacement, name)
    return name


@pytest.mark.parametrize("case", ["r1_unlooped", "r4_linear", "r4_hyperconnections"])
def test_converted_weights_give_the_numbers_that_the_reference_itself_gave(tmp_path, case):
    """1e-4 and 1e-5 as in test_reference.py: float32 rounding through eighteen layers."""
    if not REFERENCE.is_dir():
        pytest.skip("the reference numbers (shared/reference beside the repository) are not here")
    tensors = load_file(REFERENCE / f"{case}.safetensors")
    meta = json.loads((REFERENCE / "meta.json").read_text())[case]
    options = {key: meta[key] for key in OPTIONS.keys() & meta.keys()}
    options |= {"vocab_size": meta["vocab"], "sequence_len": meta["seq"]}
    weights = {
        theirs(name.removeprefix("in.")): tensor
        for name, tensor in tensors.items()
        if name.startswith("in.")
    }
    model = hub.convert_reference(write_reference(tmp_path, options, weights))
    assert model.config.num_backprop_recurrences is None  # bptt_k = num_recur
    targets = tensors["y"].long()
    with torch.no_grad():
        output = model(
            tensors["x"].long(),
            shift_labels=targets.masked_fill(targets == -1, -100),
            use_cache=False,
        )
    torch.testing.assert_close(output.logits, tensors["logits"], **ROUNDING)
    assert output.loss.item() == pytest.approx(tensors["loss"].item(), abs=1e-5)


def test_the_last_step_of_a_folder_is_read_or_the_one_asked_for(tmp_path):
    for name, value in (("999999", 2.0), ("1000000", 3.0), ("000003", 1.0), ("best", 4.0)):
        weights = reference_weights(OPTIONS)
        weights["norm_final.weight"].fill_(value)
        write_reference(tmp_path, OPTIONS, weights, name)
    (tmp_path / "optim_9999999.pt").touch()
    for step, value in ((None, 3.0), (999999, 2.0), (3, 1.0), ("best", 4.0), ("000003", 1.0)):
        model = hub.convert_reference(tmp_path, step=step)
        assert (model.model.norm.weight == value).all()
    with pytest.raises(ValueError, match="step is 4, but .* has 000003, 1000000, 999999, best"):
        hub.convert_reference(tmp_path, step=4)
    with pytest.raises(ValueError, match="step is 3, but .* is one checkpoint"):
        hub.convert_reference(tmp_path / "model_000003.pt", step=3)


def test_an_alias_is_read_where_it_is_the_only_checkpoint(tmp_path):
    write_reference(tmp_path, OPTIONS, reference_weights(OPTIONS), "best")
    assert type(hub.convert_reference(str(tmp_path))) is LoopedForCausalLM
    write_reference(tmp_path, OPTIONS, reference_weights(OPTIONS), "last")
    with pytest.raises(ValueError, match="no step but best, last: choose one with step="):
        hub.convert_reference(tmp_path)


def test_names_of_a_compiled_model_and_options_of_older_files_are_read(tmp_path):
    weights = reference_weights(OPTIONS)
    plain = hub.convert_reference(write_reference(tmp_path, OPTIONS, weights))
    older = {key: value for key, value in OPTIONS.items() if key not in ("num_recur", "bptt_k")}
    older |= {"train_recur_mean": 3, "train_recur_max": 6, "recur_warm_start": True}
    older |= {"sandwich_norm": False}
    compiled = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    model = hub.convert_reference(write_reference(tmp_path, older, compiled, "000124"))
    assert model.config.to_dict() == plain.config.to_dict()
    expected = plain.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(("k", "expected"), [(None, None), (2, 2), (3, None), (8, None)])
def test_truncated_backpropagation_is_taken_over(tmp_path, k, expected):
    options = OPTIONS | {"bptt_k": k}
    model = hub.convert_reference(write_reference(tmp_path, options, reference_weights(options)))
    assert model.config.num_backprop_recurrences == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sandwich_norm": True}, "sets sandwich_norm, which"),
        ({"window": 128}, "sets window, which"),
        ({"input_injection": "gate"}, "input_injection is 'gate'; known are additive, hyper"),
        ({"n_embd": None, "num_recur": None}, "lacks n_embd, num_recur"),
    ],
)
def test_options_that_the_architecture_does_not_have_are_refused(tmp_path, change, message):
    file = write_reference(tmp_path, OPTIONS | change, reference_weights(OPTIONS))
    with pytest.raises(ValueError, match=message):
        hub.convert_reference(file)


def test_sizes_that_the_config_refuses_are_named(tmp_path):
    file = write_reference(tmp_path, OPTIONS | {"n_kv_head": 3}, reference_weights(OPTIONS))
    with pytest.raises(StrictDataclassError, match="num_key_value_heads"):
        hub.convert_reference(file)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        hub.convert_reference(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no model_<step>.pt"):
        hub.convert_reference(tmp_path)
    file = write_reference(tmp_path, OPTIONS, reference_weights(OPTIONS))
    (tmp_path / "meta_000123.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"meta_000123\.json does not exist"):
        hub.convert_reference(file)


def test_parameters_that_do_not_fit_the_meta_file_are_named(tmp_path):
    def convert(**changes):
        weights = reference_weights(OPTIONS) | {
            name.replace("_DOT_", "."): weight for name, weight in changes.items()
        }
        kept = {name: weight for name, weight in weights.items() if weight is not None}
        return hub.convert_reference(write_reference(tmp_path, OPTIONS, kept))

    missing = r"Missing parameters: inject\.weight; unknown ones: lane_beta\."
    with pytest.raises(ValueError, match=missing):
        convert(inject_DOT_weight=None, lane_beta=torch.ones(3, 3))
    shape = r"norm_final\.weight .* has shape \[31\], but its meta file asks for \[32\]"
    with pytest.raises(ValueError, match=shape):
        convert(norm_final_DOT_weight=torch.ones(31))
    rows = r"lm_head\.weight .* has shape \[128, 32\], but its meta file asks for \[64, 32\]"
    with pytest.raises(ValueError, match=rows):
        convert(lm_head_DOT_weight=torch.ones(128, 32))


def test_a_checkpoint_that_would_run_code_is_not_loaded(tmp_path):
    file = write_reference(tmp_path, OPTIONS, reference_weights(OPTIONS))
    torch.save({"lm_head.weight": inspect.getsource}, file)  # a function, as any pickle could name
    with pytest.raises(Exception, match="[Ww]eights.only"):
        hub.convert_reference(file)
