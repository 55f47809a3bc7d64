"""The card of one run: metadata that the Hub indexes, and the filled template.

Nothing is measured and nothing guessed here: what the run directory doesn't say, the card doesn't say.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_looped.accounting import parameters
from scaling.outputs import write_text

from .fit import find_fit, read_fit
from .run import Run, read_json, read_run

TEMPLATE = Path(__file__).with_name("template.md")
LOCAL_FILES = ("parquet", "json", "text")  # corpora that are files of the machine
# Role → what its parameters are, what steps them, and the recipe's field with its base rate.
ROLES = {
    "matrix": ("matrices of the layers and the injection", "MuonH", "muonh_lr"),
    "embedding": ("embedding", "AdamW", "embedding_lr"),
    "lm_head": ("LM head", "AdamW", "lm_head_lr"),
    "norm": ("RMSNorm gains", "AdamW", "norm_lr"),
    "scalar": ("hyperconnection scalars", "AdamW", "hyperconnection_lr"),
}
# The Hub refuses a card with another identifier: https://huggingface.co/docs/hub/repositories-licenses
LICENSES = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
    etalab-2.0 eupl-1.1 gemma gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1
    llama3.2 llama3.3 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 other pddl
    postgresql unlicense wtfpl zlib
    """.split()
)


def write_card(
    run_dir: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    **choices: Any,
) -> Path:
    """Write the card of a run to the file `out` (default: the checkpoint's README.md) and return its path.

    A file that is there already is replaced. Further arguments and errors as in `build_card`.
    """
    path = Path(out) if out is not None else Path(run_dir) / "checkpoint" / "README.md"
    if path.is_dir():
        raise ValueError(f"--out is {path}, a folder. Name the file, e.g. {path / 'README.md'}.")
    beside = path.with_name("config.json")
    exported = beside.is_file() and "auto_map" in read_json(beside)
    write_text(path, f"{build_card(run_dir, exported=exported, **choices)}\n")
    return path


def build_card(
    run_dir: str | os.PathLike[str],
    *,
    fit: str | os.PathLike[str] | None = None,
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    author: str | None = None,
    repo_id: str | None = None,
    exported: bool = False,
) -> ModelCard:
    """Build the card of a finished run.

    Parameters
    ----------
    run_dir
        Folder of the run.
    fit
        JSON of `python -m scaling fit`; None: `fit.find_fit` looks for it.
    license, license_name, license_link
        The Hub's identifier; "other" needs a name and may have a link. None: the card says that no licence is stated,
        and its metadata have none, since the Hub checks the field only where it stands.
    author, repo_id
        Who trained the model, and the Hub repository it will stand in.
    exported
        Whether the card will stand in a self-contained export.

    Raises
    ------
    ValueError
        If the folder holds no finished run, its files disagree, or fit, licence or repository's name is none.
    """
    _refuse_bad_license(license, license_name, license_link)
    if repo_id is not None:
        validate_repo_id(repo_id)
    run = read_run(Path(run_dir))
    record = run.record
    grid = read_fit(Path(fit), record) if fit is not None else find_fit(Path(run_dir), record)
    data = ModelCardData(
        license=license,
        license_name=license_name,
        license_link=license_link,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["looped-transformer", "depth-recurrence", "scaling-laws", "arxiv:2604.21106"],
        datasets=[record["corpus"]] if _is_hub_dataset(record["corpus"]) else None,
        model_name=repo_id.rpartition("/")[2] if repo_id else record["run_id"],
        eval_results=_results(run),
    )
    card: ModelCard = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        **_facts(run),
        grid=grid,
        fit=grid.numbers if grid else None,
        author=author,
        repo_id=repo_id,
        exported=exported,
        license=license,
        license_name=license_name,
        license_link=license_link,
        grouped="{:,}".format,
    )
    return card


def _facts(run: Run) -> dict[str, Any]:
    """Return what the template shows of a run."""
    record, recipe = run.record, run.recipe
    return {
        "record": record,
        "recipe": recipe,
        "config": run.config,
        "total": parameters(run.config).total,
        "dtype": str(run.config.dtype).removeprefix("torch."),
        "corpus": _corpus_name(record["corpus"]),
        "sources": _public_sources(run),
        "tokenizer": _tokenizer_name(recipe["data"]["tokenizer"]),
        "tokenizer_size": run.tokenizer_size,
        "rates": [
            (*ROLES[role][:2], recipe["optimizer"][ROLES[role][2]], rate)
            for role, rate in run.peak_rates.items()
        ],
        "losses": _downstream(record),
        "versions": [one.partition("=")[::2] for one in str(record.get("versions") or "").split()],
        "git_commit": record.get("git_commit"),
    }


def _results(run: Run) -> list[EvalResult]:
    """Return every loss as an entry of the model-index."""
    record, corpus = run.record, run.record["corpus"]
    validation = EvalResult(
        task_type="text-generation",
        dataset_type=corpus if _is_hub_dataset(corpus) else _corpus_name(corpus),
        dataset_name=_corpus_name(corpus),
        dataset_config=run.recipe["data"]["dataset_config"] if _is_hub_dataset(corpus) else None,
        metric_type="loss",
        metric_name="Validation loss (nats per token)",
        metric_value=record["val_loss"],
    )
    downstream = [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=name,
            metric_type="loss",
            metric_name="Loss of the gold answer (nats per token)",
            metric_value=loss,
        )
        for name, loss in _downstream(record).items()
    ]
    return [validation, *downstream]


def _downstream(record: Mapping[str, Any]) -> dict[str, float]:
    """Downstream losses by task and axis (columns `loss/<name>`; an axis is called looped_…), nats per token."""
    return {
        name.removeprefix("loss/"): value
        for name, value in record.items()
        if name.startswith("loss/")
    }


def _is_hub_dataset(corpus: str) -> bool:
    """Whether a corpus is a dataset of the Hub by name; else it is docstrings, or files of the machine."""
    if corpus in ("docstrings", *LOCAL_FILES):
        return False
    try:
        validate_repo_id(corpus)
    except HFValidationError:  # a path
        return False
    return True


def _corpus_name(corpus: str) -> str:
    """Name of a corpus on the card, which tells nobody where a machine keeps its files.

    >>> _corpus_name("HuggingFaceFW/fineweb-edu"), _corpus_name("text"), _corpus_name("/data/mine")
    ('HuggingFaceFW/fineweb-edu', 'local text files', 'mine')
    """
    if corpus in LOCAL_FILES:
        return f"local {corpus} files"
    return corpus if _is_hub_dataset(corpus) else Path(corpus).name


def _public_sources(run: Run) -> dict[str, str]:
    """Return the corpus's sources, files without their folders."""
    if _is_hub_dataset(run.record["corpus"]):
        return dict(run.sources)
    return {Path(name).name: value for name, value in run.sources.items()}


def _tokenizer_name(tokenizer: str | None) -> str | None:
    """Name of a tokenizer on the Hub, or of its folder; None where it was trained on the corpus."""
    if tokenizer is None:
        return None
    try:
        validate_repo_id(tokenizer)
    except HFValidationError:  # a path
        return Path(tokenizer).name
    return tokenizer


def _refuse_bad_license(license: str | None, name: str | None, link: str | None) -> None:
    if license is not None and license not in LICENSES:
        close = difflib.get_close_matches(license.lower(), LICENSES, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"--license is {license!r}, which is no identifier of the Hub.{meant} A licence without one: "
            "--license other --license-name NAME."
        )
    if license == "other" and name is None:
        raise ValueError("--license is other: say which, --license-name NAME.")
    if license != "other" and (name or link):
        raise ValueError(
            f"--license-name and --license-link describe an `other` licence, but --license is {license}. Leave them "
            "out, or use --license other."
        )
