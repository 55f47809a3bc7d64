"""Grids: the paper's 116 runs to the token, the case studies, and what is refused."""

import json
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoConfig

import training
from hf_looped import LoopedConfig
from training.config import load_config
from training.grid import expand, load_grid, measured_rate, plan
from training.record import architecture_of, describe

BASELINE = Path(__file__).parents[1] / "fixtures" / "paper_runs_baseline.csv"
GRIDS = sorted((Path(training.__file__).parent / "grids").glob("*.yaml"))


@lru_cache
def expanded(name):
    """Expanding takes 50 ms a run; configs are frozen, so tests share them."""
    return expand(load_grid(name), "out")


def cell(row):
    return float(row["budget_flops"]), int(row["recurrences"]), int(row["hidden_size"])


def write_grid(folder, text):
    path = folder / "grid.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def paper():
    configs = expanded("paper")
    return configs, [describe(config, architecture_of(config)) for config in configs]


def test_the_paper_grid_has_the_token_counts_of_all_116_runs(paper):
    """Exact integers: steps = round(C / (FLOPs · B)); the same for FLOPs per token and N."""
    expected = {cell(row): row for _, row in pd.read_csv(BASELINE).iterrows()}
    _, records = paper
    assert len(records) == len(expected) == 116
    for record in records:
        row = expected.pop(cell(record))
        for name in ("tokens", "train_flops_per_token", "n_once", "n_rec", "n_injection",
                     "num_prelude_layers", "num_recurrent_layers", "num_coda_layers",
                     "shared_depth", "effective_depth", "vocab_size"):  # fmt: skip
            assert record[name] == row[name], (name, cell(record))
        assert record["tokens"] == record["steps"] * 262_144
    assert not expected


def test_every_recurrence_has_the_same_widths_at_a_budget(paper):
    widths = defaultdict(lambda: defaultdict(set))
    for record in paper[1]:
        flops, r, width = cell(record)
        widths[flops][r].add(width)
    for by_r in widths.values():
        assert set(by_r) == {1, 2, 4, 8}
        assert len({frozenset(found) for found in by_r.values()}) == 1


def test_runs_of_a_grid_have_names_of_their_own_and_the_same_data(paper):
    configs, _ = paper
    assert len({config.folder for config in configs}) == len(configs)
    assert all(config.out == "out" and config.data == configs[0].data for config in configs)


def test_truncated_bptt_differentiates_the_upper_half_of_2_4_8_recurrences():
    configs = expanded("truncated-bptt")
    pairs = Counter()
    for config in configs:
        architecture = architecture_of(config)
        assert architecture.injection == "linear" and config.variant == "truncated-bptt"
        pairs[architecture.num_recurrences, architecture.backprop_recurrences] += 1
    assert set(pairs) == {(2, 1), (4, 2), (8, 4)} and len(set(pairs.values())) == 1


def test_truncation_saves_a_fourth_of_the_flops_of_the_paper_grid(paper):
    """FACTS: 22.6 to 25.0 % fewer FLOPs per token."""
    full = {cell(record): record for record in paper[1]}
    for config in expanded("truncated-bptt"):
        record = describe(config, architecture_of(config))
        if cell(record) in full:
            saved = (
                1 - record["train_flops_per_token"] / full[cell(record)]["train_flops_per_token"]
            )
            assert 0.2255 < saved < 0.2505


def test_hyperconnections_have_two_lanes_at_2_4_8_recurrences():
    configs = expanded("hyperconnections")
    assert {config.model.recurrences for config in configs} == {2, 4, 8}
    for config in configs:
        architecture = architecture_of(config)
        assert (architecture.injection, architecture.num_lanes) == ("hyperconnections", 2)
        assert architecture.backprop_recurrences == architecture.num_recurrences
        assert config.variant == "hyperconnections"


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_grids_that_come_along_expand_and_differ_in_nothing_of_the_data(path):
    configs = expanded(path.stem)
    assert configs and all(config.data == configs[0].data for config in configs)


def test_axes_multiply_and_variants_and_overrides_change_the_recipe(tmp_path):
    path = write_grid(
        tmp_path,
        "recipe: nano\nrecurrences: [1, 2]\nseeds: [0, 5]\n"
        "budgets: [{flops: 1e10, widths: [16, 32]}, {flops: 2e10, widths: [48]}]\n"
        "variants: {plain: {}, late: {model: {injection: additive}, optimizer: {muonh_lr: 0.5}}}\n",
    )
    configs = expand(load_grid(path), "there", ["batch_tokens=2048", "data.vocab_size=300"])
    cells = {
        (c.budget_flops, c.variant, c.model.recurrences, c.model.hidden_size, c.seed)
        for c in configs
    }
    widths = {1e10: (16, 32), 2e10: (48,)}
    recipe = Path(training.__file__).parent / "recipes" / "nano.yaml"
    muonh_lr = load_config(recipe).optimizer.muonh_lr
    assert len(configs) == len(cells) == 3 * 2 * 2 * 2
    assert cells == {
        (flops, variant, r, width, seed)
        for flops in widths for variant in ("plain", "late") for r in (1, 2)
        for width in widths[flops] for seed in (0, 5)
    }  # fmt: skip
    for config in configs:
        late = config.variant == "late"
        assert config.model.injection == ("additive" if late else "linear")
        assert config.optimizer.muonh_lr == (0.5 if late else muonh_lr)
        assert (config.batch_tokens, config.data.vocab_size, config.out) == (2048, 300, "there")
        assert config.data.sequence_length == 128  # the recipe's


def test_a_budget_may_have_seeds_of_its_own(tmp_path):
    path = write_grid(
        tmp_path,
        "recipe: nano\nrecurrences: [1]\nseeds: [7]\n"
        "budgets: [{flops: 1e10, widths: [16], seeds: [1, 2]}, {flops: 2e10, widths: [16]}]\n",
    )
    found = [(config.budget_flops, config.seed) for config in expand(load_grid(path), "out")]
    assert found == [(1e10, 1), (1e10, 2), (2e10, 7)]


def test_a_recipe_may_be_a_path(tmp_path, recipe_fields):
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.create(recipe_fields | {"steps": 3}), tmp_path / "mine.yaml")
    path = write_grid(
        tmp_path,
        f"recipe: {tmp_path / 'mine.yaml'}\nrecurrences: [2]\nbudgets: [{{flops: 1e9, widths: [16]}}]\n",
    )
    (config,) = expand(load_grid(path), "out")
    # The grid's budget takes the place of the recipe's steps.
    assert (config.budget_flops, config.steps, config.model.head_dim) == (1e9, None, 8)


@pytest.mark.parametrize(
    "axes",
    [
        "recurrences: [1, 2, 2]\nbudgets: [{flops: 1e10, widths: [16]}]",
        "recurrences: [1]\nbudgets: [{flops: 1e10, widths: [16, 16]}]",
        "recurrences: [1]\nbudgets: [{flops: 1e10, widths: [16]}, {flops: 1e10, widths: [16]}]",
        "recurrences: [1]\nseeds: [3, 3]\nbudgets: [{flops: 1e10, widths: [16]}]",
    ],
)
def test_a_cell_twice_is_refused(tmp_path, axes):
    grid = load_grid(write_grid(tmp_path, f"recipe: nano\n{axes}\n"))
    with pytest.raises(ValueError, match=r"plans baseline-C1e10-r\d-d16-seed\d more than once"):
        expand(grid, "out")


def test_an_unknown_grid_lists_those_that_come_along():
    with pytest.raises(ValueError) as error:
        load_grid("papre")
    assert "--grid is 'papre'" in str(error.value)
    assert all(path.stem in str(error.value) for path in GRIDS) and GRIDS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: nano\nbudget: 3\n", "'budget' not in 'GridConfig'"),
        ("recipe: nano\nrecurrences: [1]\nbudgets: [{flop: 1e10, widths: [16]}]\n", "flop"),
        ("recipe: nano\nrecurrences: [one]\nbudgets: [{flops: 1e10, widths: [16]}]\n", "one"),
        ("recipe: nano\nrecurrences: [1]\n", "budgets"),
        ("recipe: nano\nrecurrences: [1\n", "grid.yaml"),
        ("recipe: nano\nrecurrences: [1]\nbudgets: []\n", "budgets"),
    ],
    ids=["unknown", "unknown in a budget", "type", "missing", "no YAML", "empty"],
)
def test_a_bad_grid_file_is_refused_with_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        expand(load_grid(write_grid(tmp_path, text)), "out")


def test_an_unknown_recipe_of_a_grid_is_refused(tmp_path):
    path = write_grid(
        tmp_path, "recipe: nana\nrecurrences: [1]\nbudgets: [{flops: 1e10, widths: [16]}]\n"
    )
    with pytest.raises(ValueError, match=r"nana\.yaml: no such file.*nano\.yaml"):
        expand(load_grid(path), "out")


def test_a_width_not_divisible_by_the_head_size_names_the_run(tmp_path):
    path = write_grid(
        tmp_path, "recipe: nano\nrecurrences: [1]\nbudgets: [{flops: 1e10, widths: [16, 40]}]\n"
    )
    with pytest.raises(ValueError) as error:
        expand(load_grid(path), "out")
    assert "hidden_size is 40" in str(error.value) and "head_dim = 16" in str(error.value)
    assert "r = 1, width 40" in str(error.value)  # which of the grid's runs it is


def test_a_plan_has_every_run_and_a_time_for_it(tmp_path):
    """A wider run of the same budget class has the same FLOPs, up to whole steps; times are positive."""
    path = write_grid(
        tmp_path, "recipe: nano\nrecurrences: [1, 2]\nbudgets: [{flops: 1e10, widths: [16, 32]}]\n"
    )
    configs = expand(load_grid(path), "out")
    runs = plan(configs)
    assert [run.config for run in runs] == configs
    for run in runs:
        assert run.seconds > 0
        record = run.record
        assert record["total_flops"] == record["train_flops_per_token"] * record["tokens"]
        step = record["train_flops_per_token"] * record["batch_tokens"]
        assert abs(record["total_flops"] - 1e10) <= step / 2


def test_measuring_the_rate_leaves_the_random_state_alone(tmp_path):
    import torch

    path = write_grid(
        tmp_path, "recipe: nano\nrecurrences: [1]\nbudgets: [{flops: 1e10, widths: [16]}]\n"
    )
    (config,) = expand(load_grid(path), "out")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert measured_rate(16, config) > 0
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("grid", [path.stem for path in GRIDS])
def test_every_architecture_of_a_shipped_grid_is_read_back_as_it_was_saved(grid, tmp_path):
    """Strict configs are validated when saved and when read; a derived or stale field would be refused or differ."""
    architectures = {
        json.dumps(architecture_of(config).to_dict(), sort_keys=True) for config in expanded(grid)
    }
    for number, saved in enumerate(sorted(architectures)):
        config = LoopedConfig.from_dict(json.loads(saved))
        config.save_pretrained(tmp_path / str(number))
        loaded = AutoConfig.from_pretrained(tmp_path / str(number))
        loaded.name_or_path = config.name_or_path  # where it was loaded from
        assert json.dumps(loaded.to_dict(), sort_keys=True) == saved
