# Copyright 2026 The hf-looped authors. Licensed under the Apache License, Version 2.0.
"""Looped models as self-contained folders and Hub repositories, and checkpoints of the paper's reference code.

A plain `save_pretrained` writes weights and configuration alone, to be loaded where hf-looped is installed. `export`
adds the code, so that Transformers alone loads the folder with `trust_remote_code=True`.
"""

import inspect
import json
import shutil
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files

from .configuration_looped import Injection, LoopedConfig
from .modeling_looped import LoopedForCausalLM

AUTO_MAP = {
    "AutoConfig": "configuration_looped.LoopedConfig",
    "AutoModel": "modeling_looped.LoopedModel",
    "AutoModelForCausalLM": "modeling_looped.LoopedForCausalLM",
}

CARD = """---
{metadata}
---

# Looped language model

A looped (depth-recurrent) transformer with {parameters:,} parameters: {c.num_prelude_layers} prelude layers, \
{c.num_recurrent_layers} shared layers run r = {c.num_recurrences} times, {c.num_coda_layers} coda layers; \
width {c.hidden_size}, injection `{c.injection}`. Architecture: Schwethelm et al. 2026 (arXiv:2604.21106).

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/or/repository", trust_remote_code=True)
tokens = model.generate(input_ids, max_new_tokens=20, num_recurrences=2)  # r of this call
```

`trust_remote_code=True` runs the Python files of this repository and needs Transformers 5.24 or newer. Where hf-looped
is installed, `import hf_looped` makes the flag unnecessary.

This card was written by the export. It says nothing about training data, evaluation or intended use.
"""

INJECTIONS: dict[str, Injection] = {  # the reference's names
    "inject_init_prelude": "linear",
    "additive": "additive",
    "passthrough": "passthrough",
    "hyperconnect": "hyperconnections",
}
REQUIRED_OPTIONS = (
    "vocab_size",
    "n_embd",
    "n_head",
    "n_kv_head",
    "n_prelude",
    "n_recur_block",
    "n_coda",
    "input_injection",
)
OPTIONS = {
    *REQUIRED_OPTIONS,
    *("sequence_len", "num_recur", "bptt_k", "num_lanes", "logit_softcap"),
    *("size", "recur_warm_start", "train_recur_mean", "train_recur_max"),  # deprecated or derived
}
PARTS = (  # of parameter names: ours, the reference's
    ("model.embed_tokens.", "transformer.wte."),
    ("model.prelude.", "transformer.prelude."),
    ("model.recurrent.", "transformer.recur."),
    ("model.coda.", "transformer.coda."),
    ("input_layernorm.", "n1."),
    ("post_attention_layernorm.", "n3."),
    ("self_attn.q_proj.", "attn.c_q."),
    ("self_attn.k_proj.", "attn.c_k."),
    ("self_attn.v_proj.", "attn.c_v."),
    ("self_attn.o_proj.", "attn.c_proj."),
    ("mlp.up_proj.", "mlp.c_fc."),
    ("mlp.down_proj.", "mlp.c_proj."),
    ("model.injection.proj.", "inject."),
    ("model.injection.", "lane_"),
    ("model.embed_norm.", "norm_emb."),
    ("model.recurrent_norm.", "norm_recur."),
    ("model.norm.", "norm_final."),
)
PADDED_TO = 64  # rows of the reference's embedding and LM head are a multiple of this


def export(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | PathLike,
    *,
    license: str | None = None,
    card: ModelCard | str | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` loads by itself.

    It holds what `save_pretrained` writes, the Python files that define the model's class, an `auto_map` for
    AutoConfig, AutoModel and AutoModelForCausalLM, the tokenizer's files and a model card. Files of a former export
    are overwritten, other files stay. The model is left as `save_pretrained` leaves it.

    Parameters
    ----------
    model
        Of hf-looped's class, whose code is copied from this package. A model loaded from an export with
        `trust_remote_code=True` is exported with the code that it was loaded with.
    tokenizer
        None: the folder gets none.
    folder
        Made if it does not exist.
    license
        Identifier for the card's metadata, such as `apache-2.0`. None: the metadata stays as it is.
    card
        Text of README.md. None: a README.md that exists is kept, else a minimal card is written.

    Raises
    ------
    TypeError
        If the model is no LoopedForCausalLM (wrapped, compiled, sharded, or a class of somebody else).
    ValueError
        If the model has PEFT adapters.
    """
    _require_exportable(model)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    code = inspect.getfile(type(model))
    for file in {code, *get_relative_import_files(code)}:
        shutil.copy(file, target)
    config_file = target / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) | {"auto_map": AUTO_MAP}
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _write_card(model, target / "README.md", license, card)


def push_to_hub(
    model: LoopedForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload looped language model",
    license: str | None = None,
    card: ModelCard | str | None = None,
) -> CommitInfo:
    """Export a model to a repository on the Hub, which is made if it does not exist.

    Parameters
    ----------
    model, tokenizer, license, card
        As in `export`; without `card` the repository's own README.md is kept.
    repo_id
        Name, with the owner in front where that is not the token's user.
    private
        Of a new repository. None: the owner's default.
    token
        None or True: the saved one; False: none.
    revision
        Branch, made from main if it does not exist. None: main.
    commit_message
        First line of the commit.

    Raises
    ------
    TypeError, ValueError
        As `export`, before anything is sent.
    """
    _require_exportable(model)
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if card is None and api.file_exists(repo_id, "README.md", revision=revision):
            api.hf_hub_download(repo_id, "README.md", revision=revision, local_dir=folder)
        export(model, tokenizer, folder, license=license, card=card)
        return api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
        )


def convert_reference(path: str | PathLike, *, step: int | str | None = None) -> LoopedForCausalLM:
    """Read a checkpoint of the paper's reference code as a float32 model in eval mode.

    Two things differ. The reference pads embedding and LM head to a multiple of 64 rows and crops the logits; here
    the rows are cropped, so that logits and losses are the same. It rotates queries and keys by −θ; here the rows of
    W_q and W_k that make the second half of each head are negated, which gives the same attention with Llama's +θ.

    The reference keeps cosines and sines in bfloat16, this model in float32: logits agree up to that rounding, and to
    float32's where the reference ran in float32. The reference's tokenizer is not converted.

    Parameters
    ----------
    path
        `model_<step>.pt`, or the folder with it; `meta_<step>.json` must lie beside it. A training step is a number of
        six digits, other names are aliases.
    step
        Which of the folder's checkpoints, a number or an alias. None: the last step, or the only alias.

    Raises
    ------
    FileNotFoundError
        If the checkpoint or its meta file is missing.
    ValueError
        For options that this architecture does not have, and for missing, unknown or misshapen parameters.
    huggingface_hub.errors.StrictDataclassError
        For sizes that LoopedConfig refuses; the message names the field.
    """
    weights_file = _checkpoint_file(Path(path), step)
    config = _reference_config(weights_file)
    with torch.device("meta"):
        shapes = {
            name: weight.shape for name, weight in LoopedForCausalLM(config).state_dict().items()
        }
    reference = torch.load(weights_file, map_location="cpu", weights_only=True)
    reference = {name.removeprefix("_orig_mod."): weight for name, weight in reference.items()}
    names = {_reference_name(name): name for name in shapes}
    if names.keys() != reference.keys():
        raise ValueError(
            f"{weights_file} does not fit its meta file. Missing parameters: "
            f"{_listed(names.keys() - reference.keys())}; unknown ones: {_listed(reference.keys() - names.keys())}. "
            "Check that both files belong to the same run and step."
        )
    weights = {}
    for theirs, ours in names.items():
        expected, weight = list(shapes[ours]), reference[theirs]
        if theirs in ("transformer.wte.weight", "lm_head.weight"):
            expected[0] = -(-config.vocab_size // PADDED_TO) * PADDED_TO
        if list(weight.shape) != expected:
            raise ValueError(
                f"{theirs} in {weights_file} has shape {list(weight.shape)}, but its meta file asks for {expected}. "
                "Check that both files belong to the same run and step."
            )
        weight = weight[: shapes[ours][0]].float()
        if ours.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _turn_other_way(weight, config)
        weights[ours] = weight
    return LoopedForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    )


def _require_exportable(model: Any) -> None:
    cls = type(model)
    module = cls.__module__.rpartition(".")[2]  # of this package, or of a folder's own code
    if f"{module}.{cls.__name__}" != AUTO_MAP["AutoModelForCausalLM"]:
        raise TypeError(
            f"model is a {cls.__module__}.{cls.__qualname__}, but only a LoopedForCausalLM can be exported: the folder "
            "names that class. Unwrap it first: merge_and_unload() for a PEFT model, accelerator.unwrap_model() for a "
            "distributed or compiled one; for a subclass, load its weights into a LoopedForCausalLM."
        )
    if hasattr(model, "peft_config"):
        raise ValueError(
            "model has PEFT adapters, which the exported class has no place for. Merge them "
            "(model = peft_model.merge_and_unload()) or delete them first."
        )


def _write_card(
    model: LoopedForCausalLM, file: Path, license: str | None, card: ModelCard | str | None
) -> None:
    if card is not None:
        file.write_text(str(card), encoding="utf-8")
    elif not file.exists():
        metadata = ModelCardData(
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["looped", "depth-recurrent"],
        )
        text = CARD.format(
            metadata=metadata.to_yaml(), parameters=model.num_parameters(), c=model.config
        )
        file.write_text(text, encoding="utf-8")
    if license is not None:
        written = ModelCard.load(file)
        written.data.license = license
        written.save(file)


def _checkpoint_file(path: Path, step: int | str | None) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give a model_<step>.pt or its folder.")
    if path.is_file():
        if step is not None:
            raise ValueError(
                f"step is {step!r}, but {path} is one checkpoint. Leave step out, or give the folder."
            )
        return path
    names = {file.stem.removeprefix("model_") for file in path.glob("model_*.pt")}
    if not names:
        raise FileNotFoundError(f"{path} has no model_<step>.pt.")
    if step is None:
        steps = sorted((name for name in names if name.isdecimal()), key=int)
        if not steps and len(names) > 1:
            raise ValueError(f"{path} has no step but {_listed(names)}: choose one with step=.")
        name = steps[-1] if steps else names.pop()
    else:
        name = f"{step:06d}" if isinstance(step, int) else step
        if name not in names:
            raise ValueError(f"step is {step!r}, but {path} has {_listed(names)}.")
    return path / f"model_{name}.pt"


def _reference_config(weights_file: Path) -> LoopedConfig:
    meta_file = weights_file.with_name(f"meta_{weights_file.stem.removeprefix('model_')}.json")
    if not meta_file.exists():
        raise FileNotFoundError(
            f"{meta_file} does not exist: the architecture of {weights_file.name} is read from it."
        )
    options = json.loads(meta_file.read_text(encoding="utf-8")).get("model_config", {})
    recurrences = options.get("num_recur") or options.get("train_recur_mean")
    missing = {name for name in REQUIRED_OPTIONS if options.get(name) is None}
    if recurrences is None:
        missing.add("num_recur")
    if missing:
        raise ValueError(f"{meta_file}: model_config lacks {_listed(missing)}.")
    unsupported = {name for name, value in options.items() if value and name not in OPTIONS}
    if unsupported:
        raise ValueError(
            f"{meta_file}: model_config sets {_listed(unsupported)}, which the looped architecture here does not have."
        )
    if options["input_injection"] not in INJECTIONS:
        raise ValueError(
            f"{meta_file}: input_injection is {options['input_injection']!r}; known are {_listed(INJECTIONS)}."
        )
    differentiated = options.get("bptt_k")
    return LoopedConfig(
        vocab_size=options["vocab_size"],
        hidden_size=options["n_embd"],
        num_attention_heads=options["n_head"],
        num_key_value_heads=options["n_kv_head"],
        num_prelude_layers=options["n_prelude"],
        num_recurrent_layers=options["n_recur_block"],
        num_coda_layers=options["n_coda"],
        num_recurrences=recurrences,
        num_backprop_recurrences=(
            None if differentiated is None or differentiated >= recurrences else differentiated
        ),
        injection=INJECTIONS[options["input_injection"]],
        num_lanes=options.get("num_lanes") or 2,
        max_position_embeddings=options.get("sequence_len", 2048),
        final_logit_softcapping=options.get("logit_softcap", 15.0),
    )


def _reference_name(name: str) -> str:
    for ours, theirs in PARTS:
        name = name.replace(ours, theirs)
    return name


def _turn_other_way(weight: torch.Tensor, config: LoopedConfig) -> torch.Tensor:
    """Negate the rows that make the second half of each head, [heads·C, D] → [heads·C, D]."""
    assert config.head_dim is not None  # the config has resolved it
    halves = weight.unflatten(0, (-1, 2, config.head_dim // 2))
    return torch.stack((halves[:, 0], -halves[:, 1]), dim=1).flatten(0, 2)


def _listed(names) -> str:
    return ", ".join(sorted(names)) or "none"
