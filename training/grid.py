"""Iso-FLOPs grids: budgets × widths × recurrences × seeds × variants, planned before anything runs.

A grid is a YAML file in training/grids (or anywhere): a recipe and the axes. Every run of a grid reads the same rows in
the same order, and every recurrence count has the same widths at a budget, as in Schwethelm et al. 2026
(arXiv:2604.21106, Table 6).
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hf_looped import LoopedConfig, LoopedForCausalLM
from hf_looped.accounting import train_flops_per_token

from .config import TrainingConfig, load_config, read_yaml, resolve
from .hyperp import check_batch
from .record import architecture_of, describe

FOLDER = Path(__file__).parent
PROBE_WIDTH = 768  # wider layers run at about the rate of this one
PROBE_ROWS, PROBE_TOKENS, PROBE_VOCABULARY = 4, 256, 1024


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One compute budget C in FLOPs, the widths trained at it, and its seeds where they differ from the grid's."""

    flops: float
    widths: list[int]
    seeds: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """Axes of a grid around a recipe; `variants` maps a name to the recipe's fields that it changes.

    Without variants there is one, "baseline", that changes nothing. Injection and truncation mean nothing for r = 1:
    leave it out of such a variant's grid and use the baseline's runs.
    """

    recipe: str
    budgets: list[Budget]
    recurrences: list[int]
    seeds: list[int] = field(default_factory=lambda: [0])
    variants: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run of the grid: its recipe, what its record will say (counts, FLOPs), and its estimated seconds."""

    config: TrainingConfig
    record: dict[str, Any]
    seconds: float


def load_grid(name: str) -> GridConfig:
    """Read training/grids/NAME.yaml, or the file of that path.

    Raises
    ------
    ValueError
        If there is no such grid, or a field is unknown or missing.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / "grids" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (FOLDER / "grids").glob("*.yaml")))
        raise ValueError(
            f"--grid is {name!r}: no such grid. Use one of {known}, or the path of a YAML file."
        )
    try:
        grid = OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(GridConfig), read_yaml(path))
        )
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from error
    assert isinstance(grid, GridConfig)
    for axis in ("budgets", "recurrences", "seeds"):
        if not getattr(grid, axis):
            raise ValueError(
                f"{path}: {axis} is empty: a grid without it has no runs. Give at least one."
            )
    return grid


def expand(grid: GridConfig, out: str, overrides: Sequence[str] = ()) -> list[TrainingConfig]:
    """Recipes of all runs, in the order of budgets, variants, recurrences, widths, seeds.

    Raises
    ------
    ValueError
        If a run has no valid recipe (a width not divisible by the head size, …), or two runs have the same name.
    """
    for override in overrides:
        if override.split("=")[0] in ("out", "run_id"):
            raise ValueError(
                f"{override}: a sweep sets out (by --out) and run_id itself; leave it out."
            )
    recipe = (
        Path(grid.recipe)
        if grid.recipe.endswith(".yaml")
        else FOLDER / "recipes" / f"{grid.recipe}.yaml"
    )
    if not recipe.is_file():
        load_config(recipe)  # says what recipes there are
    base = read_yaml(recipe)
    configs = []
    variants = grid.variants or {"baseline": {}}
    for budget, (variant, fields), r in product(grid.budgets, variants.items(), grid.recurrences):
        for width, seed in product(budget.widths, budget.seeds or grid.seeds):
            cell = {
                "run_id": None,
                "out": out,
                "variant": variant,
                "seed": seed,
                "budget_flops": budget.flops,
                "steps": None,
                "model": {"recurrences": r, "hidden_size": width},
            }
            merged = OmegaConf.to_container(OmegaConf.merge(base, fields, cell))
            source = f"{recipe.name}, {variant}, r = {r}, width {width}"
            configs.append(resolve(merged, overrides, source=source))
    names = [config.name for config in configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"The grid plans {twice[0]} more than once: its budgets, widths and seeds must differ."
        )
    return configs


def plan(configs: Iterable[TrainingConfig]) -> list[PlannedRun]:
    """Count parameters, tokens and FLOPs of every run, and estimate its time on one core (or GPU) of this machine."""
    configs = list(configs)
    for config in configs:
        check_batch(config.transfer, config.batch_tokens)
    records = [describe(config, architecture_of(config)) for config in configs]
    widths = {min(config.model.hidden_size, PROBE_WIDTH): config for config in configs}
    rates = {width: measured_rate(width, config) for width, config in sorted(widths.items())}
    return [
        PlannedRun(
            config=config,
            record=record,
            seconds=record["total_flops"] / rates[min(config.model.hidden_size, PROBE_WIDTH)],
        )
        for config, record in zip(configs, records, strict=True)
    ]


def measured_rate(width: int, config: TrainingConfig) -> float:
    """FLOPs per second of a training step of one layer of about this width, on one thread or one GPU."""
    head_dim = min(config.model.head_dim, width)
    architecture = LoopedConfig.iso_depth(
        width // head_dim * head_dim, 1, 1, 1, head_dim=head_dim, vocab_size=PROBE_VOCABULARY
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            model: torch.nn.Module = LoopedForCausalLM(architecture).train()
            model.to(device)
            tokens = torch.randint(PROBE_VOCABULARY, (PROBE_ROWS, PROBE_TOKENS), device=device)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            model(
                input_ids=tokens, labels=tokens, use_cache=False, skip_logits=True
            ).loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return train_flops_per_token(architecture, PROBE_TOKENS) * tokens.numel() / min(seconds)
