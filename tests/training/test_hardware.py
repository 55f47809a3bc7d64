"""What is chosen by hardware, and that a recipe's own choice wins."""

import pytest
import torch

from training import hardware
from training.config import resolve
from training.hardware import (
    choose_attention,
    choose_orthogonalise_dtype,
    choose_precision,
    multiplies_bf16,
)
from training.loop import train


def config(*fields):
    return resolve({"steps": 1}, fields)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({}, False),
        ({"avx512_bf16": False, "avx512_f": True}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
    ],
)
def test_a_cpu_multiplies_bf16_where_it_has_instructions_for_it(
    monkeypatch, capabilities, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert multiplies_bf16() is expected


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_bf16_where_it_is_multiplied_in_hardware_and_a_recipe_may_say_otherwise(
    monkeypatch, fast
):
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda: fast)
    assert choose_precision(config()) == ("bf16" if fast else "fp32")
    assert choose_orthogonalise_dtype(config()) == (torch.bfloat16 if fast else torch.float32)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        own = config(f"precision={name}", f"optimizer.orthogonalise={name}")
        assert choose_precision(own) == name and choose_orthogonalise_dtype(own) == dtype


def test_attention_is_sdpa_unless_the_recipe_names_another():
    assert choose_attention(config()) == "sdpa"
    assert choose_attention(config("attention=eager")) == "eager"


def test_what_was_chosen_reaches_the_optimiser_and_stands_in_the_record(recipe):
    """Momentum is float32 either way, so the losses of the second step tell the dtypes apart."""
    losses = {}
    for name, recorded in (("fp32", "float32"), ("bf16", "bfloat16")):
        fields = (f"optimizer.orthogonalise={name}", "attention=eager")
        record = train(recipe(f"hardware-{name}", "steps=2", *fields))
        assert record["orthogonalise"] == recorded
        assert (record["attention"], record["precision"]) == ("eager", "fp32")
        losses[name] = record["val_loss"]
    assert losses["fp32"] != losses["bf16"]
    assert losses["fp32"] == pytest.approx(losses["bf16"], rel=1e-2)
