"""The recipe of one training run: frozen, validated, merged from YAML and the command line.

A recipe is a YAML file with the fields below; `field=value` arguments override it (`model.hidden_size=64`). The
resolved recipe is saved beside the run as config.yaml and reads back to the same object. Defaults are the paper's
(Schwethelm et al. 2026, arXiv:2604.21106, sections 3.1 and 4.1, appendix C) where it has a value.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hf_looped import LoopedConfig

from .files import write_text
from .initial import model_fields

# Installed with this project; their docstrings and the standard library's come to about 37 MB.
PACKAGES = (
    "numpy",
    "scipy",
    "pandas",
    "scikit-learn",
    "sympy",
    "mpmath",
    "networkx",
    "matplotlib",
    "fonttools",
    "narwhals",
    "nltk",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "evaluate",
    "huggingface-hub",
    "lm-eval",
)


# Folders that stand beside those of the runs.
RESERVED_NAMES = ("data", "recipes", "jobs", ".claims", "plan.json", "runs.csv")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Corpus, tokenizer and packing; lengths in tokens.

    corpus: "docstrings" (of the standard library and of `packages`, as installed), a Hub dataset's name, or one of
    datasets' builders "parquet", "json", "text" with `files`. document_characters: documents longer than this are cut
    at blank lines, since packing drops what doesn't fit into a row. tokenizer: name or folder of a Transformers one;
    None trains a byte-level BPE of `vocab_size` tokens on the corpus. sequence_length: T; rows hold T + 1 tokens.
    separate_documents: attention does not cross the documents of a row (the paper: it does). allow_repeat: more tokens
    than the corpus has may be asked, in several epochs. packing_buffer: documents among which the best fit is sought.
    """

    corpus: str = "docstrings"
    packages: list[str] = field(default_factory=lambda: list(PACKAGES))
    files: list[str] = field(default_factory=list)
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_column: str = "text"
    max_documents: int | None = None
    document_characters: int | None = None
    validation_fraction: float = 0.005
    tokenizer: str | None = None
    vocab_size: int = 1024
    sequence_length: int = 2048
    separate_documents: bool = False
    allow_repeat: bool = False
    packing_buffer: int = 1000
    packing_shards: int = 16

    def __post_init__(self) -> None:
        _at_least("data.sequence_length", self.sequence_length, 2)
        _at_least("data.packing_buffer", self.packing_buffer, 1)
        _at_least("data.packing_shards", self.packing_shards, 1)
        for name in ("document_characters", "max_documents"):
            if getattr(self, name) is not None:
                _at_least(f"data.{name}", getattr(self, name), 1)
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"data.validation_fraction is {self.validation_fraction}: a share of the documents between 0 and 1 is "
                "needed."
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of the iso-depth family (`LoopedConfig.iso_depth`); lengths in layers, width in channels.

    vocab_size: entries of embedding and LM head; None: the tokenizer's, rounded up to a multiple of 64.
    backprop_recurrences: "all", "half" (⌈r/2⌉, the paper's truncated BPTT), or a number. scale_residual: every residual
    branch times 1/√(2L) for L executed layers (HyperP, arXiv:2603.28743, section 3.3; the paper: no). adapter_rank,
    time_conditioning, shortcut_weight, exit_gate, exit_entropy_weight: as in `LoopedConfig`. sample_recurrences: draw
    the recurrences of every step, Poisson-log-normal with mean `recurrences` and σ `sampling_sigma` (`trajectories`).
    What varies the loop has no meaning for r = 1, which is trained without.
    """

    hidden_size: int = 640
    recurrences: int = 4
    effective_depth: int = 20
    shared_depth: int = 16
    head_dim: int = 128
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    injection: str = "linear"
    num_lanes: int = 2
    state_init: str = "auto"
    backprop_recurrences: str = "all"
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    scale_residual: bool = False
    adapter_rank: int | None = None
    time_conditioning: bool = False
    shortcut_weight: float = 0.1
    exit_gate: bool = False
    exit_entropy_weight: float = 0.1
    sample_recurrences: bool = False
    sampling_sigma: float = 0.5

    def __post_init__(self) -> None:
        value = self.backprop_recurrences
        self._check_sampling()
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(
                f"model.rope_theta is {self.rope_theta}: it must be positive and finite."
            )
        if self.vocab_size is not None:
            _at_least("model.vocab_size", self.vocab_size, 1)
        if value not in ("all", "half") and not (value.isascii() and value.isdecimal()):
            raise ValueError(
                f"model.backprop_recurrences is {value!r}: use 'all', 'half' or a number of recurrences."
            )

    def build(self, vocab_size: int, sequence_length: int, **ids: int | None) -> LoopedConfig:
        """Architecture for a vocabulary and a sequence length in tokens; `ids` are the special tokens'."""
        r = self.recurrences
        try:
            return LoopedConfig.iso_depth(
                hidden_size=self.hidden_size,
                recurrences=r,
                effective_depth=self.effective_depth,
                shared_depth=self.shared_depth,
                head_dim=self.head_dim,
                num_key_value_heads=self.num_key_value_heads,
                intermediate_size=self.intermediate_size,
                vocab_size=vocab_size,
                injection=self.injection,
                num_lanes=self.num_lanes,
                state_init="auto" if r == 1 else self.state_init,
                num_backprop_recurrences=self.num_backprop_recurrences,
                tie_word_embeddings=self.tie_word_embeddings,
                adapter_rank=self.adapter_rank,
                time_conditioning=self.time_conditioning,
                shortcut_weight=self.shortcut_weight,
                exit_gate=self.exit_gate,
                exit_entropy_weight=self.exit_entropy_weight,
                residual_multiplier=(2 * self.effective_depth) ** -0.5
                if self.scale_residual
                else 1.0,
                rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
                max_position_embeddings=sequence_length,
                **ids,
            )
        except StrictDataclassError as error:
            raise ValueError(f"model: {error.__cause__ or error}") from error

    def _check_sampling(self) -> None:
        """Refuse drawn recurrences with what needs a fixed number of them."""
        if not 0 < self.sampling_sigma <= 1:
            raise ValueError(
                f"model.sampling_sigma is {self.sampling_sigma}: it must lie in (0, 1]; 0.5 is the published one."
            )
        fixed = {
            "injection: hyperconnections": self.injection == "hyperconnections",
            "adapter_rank": self.adapter_rank is not None,
            "exit_gate": self.exit_gate,
            "time_conditioning": self.time_conditioning,
        }
        for name, given in fixed.items():
            if self.sample_recurrences and given:
                raise ValueError(
                    f"model.sample_recurrences draws r anew at every step, but model.{name} needs a fixed number. Use "
                    "one of them."
                )

    @property
    def samples(self) -> bool:
        """Whether steps draw their recurrences: not those of an unlooped model."""
        return self.sample_recurrences and self.recurrences > 1

    @property
    def num_backprop_recurrences(self) -> int | None:
        """Recurrences that are differentiated, counted from the last; None: all."""
        if self.backprop_recurrences == "all":
            return None
        return (
            -(-self.recurrences // 2)
            if self.backprop_recurrences == "half"
            else int(self.backprop_recurrences)
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Base learning rates at the reference point of `TransferConfig`, and the optimisers' constants (paper, Table 4).

    orthogonalise: dtype of MuonH's orthogonalisation; "auto": bf16 where the hardware multiplies it, else fp32.
    """

    muonh_lr: float = 0.014
    embedding_lr: float = 0.3
    lm_head_lr: float = 0.004
    norm_lr: float = 0.005
    hyperconnection_lr: float = 0.01
    momentum: float = 0.95
    betas: list[float] = field(default_factory=lambda: [0.8, 0.95])
    eps: float = 1e-10
    final_lr_fraction: float = 0.1
    orthogonalise: str = "auto"

    def __post_init__(self) -> None:
        _one_of("optimizer.orthogonalise", self.orthogonalise, ("auto", "fp32", "bf16"))
        for name in ("momentum", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}: it must lie in 0..1.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {self.betas}: two numbers in [0, 1) are needed.")
        names = ("muonh_lr", "embedding_lr", "lm_head_lr", "norm_lr", "hyperconnection_lr", "eps")
        for name in names:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"optimizer.{name} is {getattr(self, name)}: it must be positive and finite."
                )


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """HyperP: where the base rates were tuned and how they move (paper, section 4.1).

    The reference horizon is `tokens_per_parameter` tokens for each executed non-embedding parameter of the model of
    width `reference_width` of the same kind (if looped: with `reference_recurrences`, where its layers allow).
    depth_exponent: of L/L_ref, the executed layers, in the rate of MuonH's matrices; 0 as in the paper, −0.5 in
    HyperP (arXiv:2603.28743).
    """

    reference_width: int = 640
    reference_batch_tokens: int = 262_144
    reference_recurrences: int = 4
    tokens_per_parameter: float = 10.0
    width_exponent: float = -0.5
    batch_exponent: float = 0.558
    tokens_exponent: float = -0.32
    depth_exponent: float = 0.0
    reference_depth: int = 20

    def __post_init__(self) -> None:
        for name in ("width", "batch_tokens", "recurrences", "depth"):
            _at_least(f"transfer.reference_{name}", getattr(self, f"reference_{name}"), 1)
        for name in ("width", "batch", "tokens", "depth"):
            if not math.isfinite(getattr(self, f"{name}_exponent")):
                raise ValueError(
                    f"transfer.{name}_exponent is {getattr(self, f'{name}_exponent')}: it must be finite."
                )
        if not 0 < self.tokens_per_parameter < math.inf:
            raise ValueError(
                f"transfer.tokens_per_parameter is {self.tokens_per_parameter}: it must be positive and finite."
            )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One run. Exactly one of `budget_flops` (C; steps = round(C / (FLOPs per token · batch))) and `steps` is given.

    run_id: name of the run's folder in `out`; None: made of variant, budget, r, width and seed. batch_tokens: tokens of
    one step over all processes. micro_batch_rows: rows of one forward pass; None: as many as hold 16,384 tokens.
    precision, attention: "auto" chooses by hardware. compile: torch.compile. sharding: "none" (DDP, where there are
    several processes) or "fsdp2". init_from: folder of `save_pretrained` to train on; its architecture and weights are
    taken, `model.recurrences` and `model.backprop_recurrences` may differ. checkpoint_every: steps between states to
    resume from, of which the last `checkpoints_kept` stay. report_to: "none" or a tracker of Accelerate: tensorboard,
    wandb, trackio. samples: greedy continuations of validation rows written to samples.md at the end.
    """

    run_id: str | None = None
    out: str = "runs"
    variant: str = "baseline"
    seed: int = 0
    budget_flops: float | None = None
    steps: int | None = None
    batch_tokens: int = 262_144
    micro_batch_rows: int | None = None
    precision: str = "auto"
    attention: str = "auto"
    compile: bool = False
    sharding: str = "none"
    init_from: str | None = None
    log_every: int = 10
    checkpoint_every: int = 500
    checkpoints_kept: int = 2
    evaluation_rows: int = 16
    report_to: str = "none"
    samples: int = 4
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)

    def __post_init__(self) -> None:
        if (self.budget_flops is None) == (self.steps is None):
            raise ValueError(
                f"budget_flops is {self.budget_flops} and steps is {self.steps}: give exactly one of them, the compute "
                "or the number of optimiser steps."
            )
        if self.budget_flops is not None and not 0 < self.budget_flops < math.inf:
            raise ValueError(
                f"budget_flops is {self.budget_flops}: it must be positive and finite."
            )
        if (
            Path(self.name).name != self.name
            or self.name.startswith(".")
            or self.name in RESERVED_NAMES
        ):
            raise ValueError(
                f"run_id (or variant) makes the folder name {self.name!r}: it must have no slashes, not begin with a "
                f"dot, and not be one of {', '.join(RESERVED_NAMES)}."
            )
        planned, most = self.data.vocab_size, self.model.vocab_size
        if self.data.tokenizer is None and most is not None and planned > most:
            raise ValueError(
                f"data.vocab_size is {planned}, above model.vocab_size = {most}: the tokenizer would have tokens that "
                "the model lacks. Lower it, or leave model.vocab_size out."
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}: it must be from 0 to 2**32 - 1.")
        if self.steps is not None:
            _at_least("steps", self.steps, 1)
        for name in ("log_every", "checkpoint_every", "checkpoints_kept", "evaluation_rows"):
            _at_least(name, getattr(self, name), 1)
        _at_least("samples", self.samples, 0)
        _one_of("sharding", self.sharding, ("none", "fsdp2"))
        _one_of("report_to", self.report_to, ("none", "tensorboard", "wandb", "trackio"))
        _one_of("precision", self.precision, ("auto", "fp32", "bf16"))
        _one_of("attention", self.attention, ("auto", "eager", "sdpa", "flash_attention_2"))
        if self.batch_tokens < 1 or self.batch_tokens % self.data.sequence_length:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}: it must be a multiple of data.sequence_length = "
                f"{self.data.sequence_length}, since a batch holds whole rows."
            )
        if self.micro_batch_rows is not None and (
            self.micro_batch_rows < 1 or self.batch_rows % self.micro_batch_rows
        ):
            raise ValueError(
                f"micro_batch_rows is {self.micro_batch_rows}: it must divide the {self.batch_rows} rows of a batch."
            )
        # Before any data is read: does the architecture exist at all?
        if self.init_from is None:
            self.model.build(self.model.vocab_size or 64, self.data.sequence_length)

    @property
    def batch_rows(self) -> int:
        """Packed rows of one optimiser step over all processes."""
        return self.batch_tokens // self.data.sequence_length

    @property
    def name(self) -> str:
        """`run_id`, or the name made of what sets a run of a grid apart."""
        if self.run_id is not None:
            return self.run_id
        size = (
            f"C{self.budget_flops:.3g}" if self.budget_flops is not None else f"{self.steps}steps"
        )
        model = f"r{self.model.recurrences}-d{self.model.hidden_size}"
        return f"{self.variant}-{size}-{model}-seed{self.seed}".replace("+", "")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.out) / self.name

    @property
    def data_folder(self) -> Path:
        """Packed data, shared by all runs in `out`."""
        return Path(self.out) / "data"


def load_config(recipe: Path | str, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a recipe and apply `field=value` overrides.

    Raises
    ------
    ValueError
        If the file is missing, a field is unknown, has a wrong type, or breaks a rule; the message names it.
    """
    path = Path(recipe)
    if not path.is_file():
        known = sorted(p.name for p in (Path(__file__).parent / "recipes").glob("*.yaml"))
        raise ValueError(
            f"--config is {path}: no such file. Recipes that come along in training/recipes: {known}."
        )
    for override in overrides:
        if "=" not in override:
            raise ValueError(
                f"{override!r} is not of the form field=value, e.g. model.hidden_size=64."
            )
    return resolve(read_yaml(path), overrides, source=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds fields; anything else is a ValueError that names the file and the line."""
    try:
        fields = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ValueError(
            f"{path} holds a list or a single value: it must hold fields, one `name: value` a line."
        )
    return {str(name): value for name, value in fields.items()}


def resolve(fields: Any, overrides: Sequence[str] = (), source: str = "recipe") -> TrainingConfig:
    """Build the config from nested plain fields and overrides; errors as in `load_config`."""
    try:
        given = OmegaConf.merge(
            OmegaConf.create(fields or {}), OmegaConf.from_dotlist(list(overrides))
        )
        plain = _with_checkpoint(OmegaConf.to_container(given, throw_on_missing=True))
        config = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(TrainingConfig), OmegaConf.create(plain))
        )
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(f"{source}: {key}{str(error).splitlines()[0]}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    assert isinstance(config, TrainingConfig)
    return config


def _with_checkpoint(fields: Any) -> Any:
    """Fill in what `init_from` decides: the model, the tokenizer, and the recurrences of the reference model."""
    init_from, model = fields.get("init_from"), fields.get("model") or {}
    if init_from is None or set(model) == {f.name for f in dataclasses.fields(ModelConfig)}:
        return fields  # a resolved recipe says it all
    model = model_fields(init_from, model)
    transfer = {"reference_recurrences": model["recurrences"]} | (fields.get("transfer") or {})
    data = {"tokenizer": init_from} | (fields.get("data") or {})
    return fields | {"model": model, "transfer": transfer, "data": data}


def save_config(config: TrainingConfig, path: Path) -> None:
    """Write the resolved recipe; `load_config` reads it back to an equal object."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(asdict(config))))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}: it must be at least {least}.")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}: use one of {', '.join(known)}.")
