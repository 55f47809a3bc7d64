"""The recipe of one training run: frozen, validated, merged from YAML and the command line.

A recipe is a YAML file with the fields below; `field=value` arguments override it (`model.hidden_size=64`).
The resolved recipe is saved beside the run as config.yaml and reads back to the same object. Rates and
exponents are the paper's by default (Schwethelm et al. 2026, arXiv:2604.21106, sections 4 and appendix C).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Corpus, tokenizer and packing. Lengths in tokens."""

    corpus: str = "docstrings"
    packages: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_column: str = "text"
    max_documents: int | None = None
    validation_fraction: float = 0.005
    tokenizer: str | None = None
    vocab_size: int = 1024
    sequence_length: int = 256
    separate_documents: bool = False
    allow_repeat: bool = False
    packing_buffer: int = 1000
