"""`python -m training.retrofit LLAMA --out FOLDER`: make a looped model of a pretrained Llama or Mistral.

After McLeish et al. 2025 (arXiv:2511.07384): the first layers become the prelude, later ones the recurrent block, the
last ones the coda; the layers between are dropped. As in their conversions (TinyLlama: 0–3, 10–17 and 18–21 of 22
layers), the recurrent block is by default the layers just before the coda.

The looped model has the Llama's block: gated MLP, no QK-norm, no norm after the embedding, no soft cap, and no norm of
the state after a recurrence either, since the coda's layers were trained to read the residual stream as it is. So it
starts from a function that is known, that of the Llama with the dropped layers taken out, the kept layers:

    linear         kept layers, each run once, for every r: W = [I ‖ 0] hands every recurrence the prelude's output
    passthrough    kept layers, the block run r times in a row
    additive       kept layers for r = 1; later recurrences read h + e

`linear` therefore starts at the loss of the kept layers whatever r is, and learns through W to read its state.

Train on with the recipe field `init_from: FOLDER`; exit status here: 0 done, 2 bad input.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedConfig as Config

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.accounting import parameters

from .files import new_folder
from .messages import say

INJECTIONS = ("linear", "additive", "passthrough")
SECTIONS = ("prelude", "recurrent", "coda")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
CARRIED = (  # fields that both configs have under the same name
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
LACKING = {  # what other families have that the looped block doesn't
    "qwen2": "biases of queries, keys and values",
    "qwen3": "gains in the norms of queries and keys",
    "gemma": "RMSNorm with the gain 1 + w and scaled embeddings",
    "gemma2": "norms after attention and MLP, sliding windows and soft-capped attention",
    "gemma3_text": "norms after attention and MLP, sliding windows and gains in the norms of queries and keys",
    "granite": "multipliers of embeddings, attention scores and logits",
    "olmo2": "norms after attention and MLP instead of before",
    "phi3": "fused projections of queries, keys and values and of the MLP",
    "smollm3": "layers without rotary embedding",
}


def choose_layers(
    total: int, prelude: int, recurrent: int, coda: int, start: int | None = None
) -> dict[str, range]:
    """Layers of the pretrained model, counted from 0, that each section takes.

    Parameters
    ----------
    total
        Layers of the pretrained model.
    prelude, recurrent, coda
        Layers of each section: the first `prelude`, the last `coda`, and `recurrent` in a row between them.
    start
        First layer of the recurrent block. None: the block ends where the coda begins.

    Raises
    ------
    ValueError
        If a section's size is too small, or the sections don't fit beside each other.

    Examples
    --------
    >>> choose_layers(22, 4, 8, 4)
    {'prelude': range(0, 4), 'recurrent': range(10, 18), 'coda': range(18, 22)}
    """
    for name, size, least in (
        ("prelude", prelude, 0),
        ("recurrent", recurrent, 1),
        ("coda", coda, 0),
    ):
        if size < least:
            raise ValueError(f"{name} is {size}: at least {least} layers are needed.")
    if prelude + recurrent + coda > total:
        raise ValueError(
            f"prelude + recurrent + coda is {prelude + recurrent + coda} layers, but the model has {total}. Take fewer."
        )
    last = total - coda - recurrent
    if start is None:
        start = last
    if not prelude <= start <= last:
        raise ValueError(
            f"start is {start}: {recurrent} recurrent layers between {prelude} of the prelude and {coda} of the coda, "
            f"{total} in all, begin at one of {prelude}..{last}."
        )
    return {
        "prelude": range(prelude),
        "recurrent": range(start, start + recurrent),
        "coda": range(total - coda, total),
    }


def looped_config(
    llama: Config, layers: Mapping[str, range], recurrences: int, injection: str = "linear"
) -> LoopedConfig:
    """Architecture of the looped model for a Llama's or Mistral's config and the layers that are kept.

    Raises
    ------
    ValueError
        If the pretrained model has what the looped block lacks, or `recurrences` or `injection` has no meaning.
    """
    _check_family(llama)
    if recurrences < 1:
        raise ValueError(f"recurrences is {recurrences}: at least one recurrence is needed.")
    if injection not in INJECTIONS:
        raise ValueError(f"injection is {injection!r}: use one of {', '.join(INJECTIONS)}.")
    carried: dict[str, Any] = {name: getattr(llama, name) for name in CARRIED}
    sections: dict[str, Any] = {f"num_{name}_layers": len(layers[name]) for name in SECTIONS}
    return LoopedConfig(
        **carried,
        **sections,
        num_recurrences=recurrences,
        injection=injection,  # type: ignore[arg-type]
        attention_dropout=getattr(llama, "attention_dropout", None) or 0.0,
        gated_mlp=True,
        qk_norm=False,
        embedding_norm=False,
        recurrent_norm=False,
        final_logit_softcapping=None,
    )


def looped_model(
    llama: PreTrainedModel,
    layers: Mapping[str, range],
    recurrences: int,
    injection: str = "linear",
) -> LoopedForCausalLM:
    """Looped model, in eval mode, with the weights of a Llama's or Mistral's layers; errors as in `looped_config`."""
    config = looped_config(llama.config, layers, recurrences, injection)
    pretrained = llama.state_dict()
    places = {
        f"model.{section}.{place}.": f"model.layers.{layer}."
        for section in SECTIONS
        for place, layer in enumerate(layers[section])
    }
    with torch.device("meta"):
        names = list(LoopedForCausalLM(config).state_dict())
    weights = {}
    for name in names:
        if name == "model.injection.proj.weight":
            eye = torch.eye(config.hidden_size, dtype=llama.dtype)
            weights[name] = torch.cat((eye, torch.zeros_like(eye)), dim=1)
            continue
        place = next((place for place in places if name.startswith(place)), "")
        weights[name] = pretrained[places.get(place, "") + name.removeprefix(place)].clone()
    model = LoopedForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=llama.dtype
    )
    model.generation_config = llama.generation_config
    return model


def retrofit(
    source: Path | str,
    out: Path | str,
    *,
    prelude: int,
    recurrent: int,
    coda: int,
    recurrences: int,
    injection: str = "linear",
    start: int | None = None,
) -> dict[str, Any]:
    """Make the folder `out` with the looped model of the checkpoint `source` and its tokenizer, if it has one.

    Weights keep their dtype. The folder is there whole or not at all.

    Returns
    -------
    dict
        layers: of each section and `dropped`, counted from 0; parameters_before, parameters_after: counts.

    Raises
    ------
    ValueError
        If `out` exists, `source` is no checkpoint of a Llama or Mistral, or the layers don't fit.
    OSError
        If `out` can't be written.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise ValueError(f"out is {out}, which exists. Name a new folder, or remove it.")
    config = _read_config(source)
    _check_family(config)
    layers = choose_layers(config.num_hidden_layers, prelude, recurrent, coda, start)
    looped_config(
        config, layers, recurrences, injection
    )  # what is wrong is said before weights are read
    tokenizer = _read_tokenizer(source)
    llama = _read_model(source)
    model = looped_model(llama, layers, recurrences, injection)
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    kept = {layer for section in SECTIONS for layer in layers[section]}
    dropped = [layer for layer in range(config.num_hidden_layers) if layer not in kept]
    return {
        "layers": {section: list(layers[section]) for section in SECTIONS} | {"dropped": dropped},
        "parameters_before": llama.num_parameters(),
        "parameters_after": parameters(model.config).total,
    }


def _check_family(config: Config) -> None:
    kind = config.model_type
    if kind not in ("llama", "mistral"):
        lacking = LACKING.get(kind)
        has = f", which has {lacking}, and the looped block does not" if lacking else ""
        raise ValueError(
            f"model_type is {kind!r}{has}: only llama and mistral checkpoints can be retrofitted."
        )
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise ValueError(f"{name} is true, but the looped block has no biases.")
    if getattr(config, "sliding_window", None) is not None:
        raise ValueError(
            f"sliding_window is {config.sliding_window}, but the looped block attends to all earlier tokens. Set it to "
            "null in config.json if the model may do so too."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("The checkpoint has quantised weights; retrofit the one it was made from.")


def _read_config(source: Path) -> Config:
    if not source.is_dir():
        raise ValueError(f"{source} is no folder. Give one with config.json and weights.")
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{source} holds no config that Transformers can read: {reason}"
        ) from error


def _read_model(source: Path) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{source} holds no weights that fit its config: {reason}") from error
    model, info = loaded
    wrong = sorted(info["missing_keys"] | info["unexpected_keys"])
    if wrong:
        raise ValueError(
            f"{source} does not hold the weights of its config; missing or unknown: {', '.join(wrong[:5])}"
            f"{' …' if len(wrong) > 5 else ''}. Check that both belong together."
        )
    return model


def _read_tokenizer(source: Path) -> Any:
    if not any((source / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{source} holds a tokenizer that cannot be read: {reason}") from error


def _span(layers: Sequence[int]) -> str:
    """Write runs of layers in short: [2, 3, 4, 9] → 2–4, 9."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "–"


def _table(result: Mapping[str, Any], recurrences: int) -> Table:
    table = Table(box=None)
    table.add_column("section")
    table.add_column("layers of the pretrained model")
    for section, layers in result["layers"].items():
        times = f", run {recurrences} times" if section == "recurrent" else ""
        table.add_row(section, _span(layers) + times)
    table.add_row("parameters before", f"{result['parameters_before']:,}")
    table.add_row("parameters after", f"{result['parameters_after']:,}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, convert, and say which layer went where."""
    parser = argparse.ArgumentParser(
        prog="python -m training.retrofit",
        description="Make a looped model of a pretrained Llama or Mistral, to be trained on with init_from.",
    )
    parser.add_argument("source", metavar="LLAMA", help="folder with config.json and weights")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new folder")
    for section, size in (("prelude", 2), ("recurrent", 4), ("coda", 2)):
        parser.add_argument(
            f"--{section}", type=int, default=size, metavar="LAYERS", help=f"default {size}"
        )
    parser.add_argument("--recurrences", type=int, default=4, metavar="R", help="default 4")
    parser.add_argument("--injection", choices=INJECTIONS, default="linear", help="default linear")
    parser.add_argument(
        "--start",
        type=int,
        metavar="LAYER",
        help="first recurrent layer, counted from 0; default: the block ends where the coda begins",
    )
    options = vars(parser.parse_args(arguments))
    out, recurrences = options["out"], options["recurrences"]
    try:
        result = retrofit(options.pop("source"), options.pop("out"), **options)
    except (ValueError, OSError) as error:
        say(Console(stderr=True), f"error: {error}", style="red")
        return 2
    console = Console()
    console.print(_table(result, recurrences))
    say(console, f"{out}: train on with init_from={out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
