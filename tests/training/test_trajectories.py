"""Drawn recurrences: their distribution, their FLOPs in expectation and as run, and what a step does with them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_looped.accounting import train_flops_per_token
from training.loop import train
from training.record import architecture_of, describe
from training.trajectories import (
    Trajectory,
    expected_flops_per_token,
    flops_as_run,
    probabilities,
    trajectory,
)

SAMPLED = ("model.sample_recurrences=true", "model.recurrences=4", "model.shared_depth=4")
ELASTIC = ("model.time_conditioning=true", "model.recurrences=4", "model.shared_depth=4")


@pytest.mark.parametrize(("mean", "sigma"), [(2, 0.5), (4, 0.5), (8, 0.5), (4, 1.0), (32, 0.25)])
def test_probabilities_have_the_moments_of_the_poisson_log_normal(mean, sigma):
    """Mean r̄, variance λ + λ²(exp(σ²) − 1) with λ = r̄ − 1: closed forms of the mixture."""
    pairs = list(probabilities(mean, sigma))
    r, p = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    rate = mean - 1
    assert p.sum() == pytest.approx(1, abs=1e-9)
    assert p @ r == pytest.approx(mean, rel=1e-6)  # the tail left out
    variance = rate + rate**2 * math.expm1(sigma**2)
    assert p @ (r - mean) ** 2 == pytest.approx(variance, rel=1e-4)  # the tail left out


def test_draws_follow_the_probabilities_and_depend_on_seed_and_step_alone(recipe):
    """20,000 draws: each share that is not rare within five standard errors."""
    config = recipe("draws", *SAMPLED)
    architecture = architecture_of(config)
    draws = [trajectory(config, architecture, step).recurrences for step in range(20_000)]
    shares = np.bincount(draws) / len(draws)
    for r, p in probabilities(4, 0.5):
        if p > 1e-3:
            assert abs(shares[r] - p) < 5 * math.sqrt(p * (1 - p) / len(draws))
    assert draws[:50] == [trajectory(config, architecture, step).recurrences for step in range(50)]
    other = replace(config, seed=1)
    assert draws[:50] != [trajectory(other, architecture, step).recurrences for step in range(50)]


@pytest.mark.parametrize("truncation", ["all", "half", "1"])
def test_flops_in_expectation_are_the_mean_of_those_as_run(recipe, truncation):
    """Without truncation exactly those of r̄; with it, and as run, within five standard errors of 20,000 steps."""
    config = recipe("flops", *SAMPLED, f"model.backprop_recurrences={truncation}")
    architecture = architecture_of(config)
    expected, steps = expected_flops_per_token(config, architecture), 20_000
    if truncation == "all":
        assert expected == train_flops_per_token(architecture, config.data.sequence_length)
    costs = [
        train_flops_per_token(architecture, config.data.sequence_length, drawn.recurrences)
        for drawn in (trajectory(config, architecture, step) for step in range(steps))
    ]
    assert flops_as_run(config, architecture, steps) == config.batch_tokens * sum(costs)
    assert np.mean(costs) == pytest.approx(expected, abs=5 * np.std(costs) / math.sqrt(steps))


def test_shortcuts_are_uniform_and_cost_a_second_pass(recipe):
    config = recipe("shortcuts", *ELASTIC)
    architecture = architecture_of(config)
    draws = [trajectory(config, architecture, step).shortcut for step in range(3_000)]
    assert set(draws) == {1, 2, 3}
    assert np.bincount(draws)[1:] == pytest.approx(1000, abs=5 * math.sqrt(3000 * 2 / 9))
    length = config.data.sequence_length
    each = [train_flops_per_token(architecture, length, None, s) for s in (1, 2, 3)]
    assert expected_flops_per_token(config, architecture) == sum(each) / 3


def test_a_recipe_that_draws_nothing_runs_its_own_recurrences(recipe):
    for overrides in ((), ("model.time_conditioning=true", "model.shortcut_weight=0")):
        config = recipe("fixed", *overrides)
        assert trajectory(config, architecture_of(config), 3) == Trajectory()
    unlooped = recipe("one", *SAMPLED, "model.recurrences=1")
    assert not unlooped.model.samples
    record = describe(unlooped, architecture_of(unlooped))
    assert record["total_flops"] == record["train_flops_per_token"] * record["tokens"]


@pytest.mark.parametrize("overrides", [SAMPLED, ELASTIC], ids=["sampled", "elastic"])
def test_steps_run_what_they_draw_and_the_record_says_what_it_cost(recipe, monkeypatch, overrides):
    """Recurrences are counted where the model runs them; a resumed run draws what the whole one drew."""
    from hf_looped import LoopedModel

    ran: list[tuple[int, bool]] = []
    original = LoopedModel._recur

    def counting(self, e, r, cache, every_state, **kwargs):
        if self.training:
            ran.append(r)
        return original(self, e, r, cache, every_state, **kwargs)

    monkeypatch.setattr(LoopedModel, "_recur", counting)
    config = recipe(f"run-{overrides[0]}", *overrides)
    record = train(config)
    architecture = architecture_of(config)
    draws = [trajectory(config, architecture, step) for step in range(config.steps)]
    expected = []
    for drawn in draws:
        expected += [drawn.recurrences or 4] + ([drawn.shortcut] if drawn.shortcut else [])
    assert ran == expected
    assert record["total_flops"] == flops_as_run(config, architecture, config.steps)
    assert record["sample_recurrences"] == ("sample" in overrides[0])
    assert math.isfinite(record["val_loss"])
    assert (
        json.loads((config.folder / "run.json").read_text())["total_flops"] == record["total_flops"]
    )


@pytest.mark.parametrize(
    "fields",
    [
        ("model.injection=diagonal",),
        ("model.adapter_rank=2",),
        ("model.exit_gate=true",),
        ("model.time_conditioning=true",),
        ("model.adapter_rank=1", "model.injection=hyperconnections"),
    ],
    ids=str,
)
def test_every_variant_trains_and_its_checkpoint_gives_the_loss_that_the_record_has(recipe, fields):
    """The validation loss is the cross entropy after all recurrences, whatever the objective of training."""
    from hf_looped import LoopedForCausalLM

    config = recipe("-".join(fields).replace("=", "-"), *fields)
    record = train(config)
    losses = [
        json.loads(line)["loss"] for line in (config.folder / "log.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0]
    model = LoopedForCausalLM.from_pretrained(config.folder / "checkpoint")
    shards = sorted((config.data_folder / "validation").glob("*.npy"))
    rows = torch.as_tensor(np.concatenate([np.load(shard) for shard in shards]).astype(np.int64))
    with torch.no_grad():
        logits = model(rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert record["val_loss"] == pytest.approx(loss.item(), abs=1e-5)  # sums of batches in float32


@pytest.mark.parametrize(
    "other",
    [
        "model.injection=hyperconnections",
        "model.adapter_rank=2",
        "model.exit_gate=true",
        "model.time_conditioning=true",
    ],
)
def test_drawn_recurrences_are_refused_with_what_needs_a_fixed_number(recipe, other):
    with pytest.raises(ValueError, match="draws r anew at every step, but model"):
        recipe("both", *SAMPLED, other)


@pytest.mark.parametrize("sigma", [0.0, -1.0, 1.5, float("nan")])
def test_a_sigma_out_of_range_is_refused(recipe, sigma):
    with pytest.raises(ValueError, match=r"model.sampling_sigma is .* must lie in \(0, 1\]"):
        recipe("sigma", f"model.sampling_sigma={sigma}")
