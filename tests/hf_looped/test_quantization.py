"""Weights of eight bits from torchao, through from_pretrained."""

import pytest
import torch
from transformers import TorchAoConfig

from hf_looped import LoopedForCausalLM

torchao = pytest.importorskip("torchao", reason="needs torchao (the quantization extra)")
pytestmark = pytest.mark.slow  # for torchao's import alone


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("injection", ["linear", "additive", "passthrough", "hyperconnections"])
def test_int8_weights_load_generate_and_come_back(tiny_model, tokens, tmp_path, injection, tied):
    """Each weight within half a step of 1/127 of its row's largest: the same as quantising by hand.

    A step is some 2 % of a typical weight, about 20 products, in part averaged out: 5 % of the logits' size.
    """
    from torchao.quantization import Int8WeightOnlyConfig

    model, ids = tiny_model(injection=injection, tie_word_embeddings=tied), tokens()
    model.save_pretrained(tmp_path / "float")
    quantised = LoopedForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
    )
    for name, module in quantised.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        expected = model.get_submodule(name).weight
        kept = type(module.weight) is torch.nn.Parameter
        assert kept == (name == "lm_head")
        if not kept:
            step = expected.abs().amax(dim=1, keepdim=True) / 127
            assert ((module.weight.dequantize() - expected).abs() <= 0.51 * step + 1e-6).all(), name
    with torch.no_grad():
        exact, near = (m(ids, use_cache=False).logits for m in (model, quantised))
        skipped = quantised(ids, labels=ids, skip_logits=True).loss
        assert skipped.item() == pytest.approx(quantised(ids, labels=ids).loss.item(), rel=1e-5)
    assert 0 < (near - exact).norm() <= 0.05 * exact.norm()

    new = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    generated = quantised.generate(ids, **new)
    assert torch.equal(quantised.generate(ids, use_cache=False, **new), generated)
    quantised.save_pretrained(tmp_path / "int8")
    reloaded = LoopedForCausalLM.from_pretrained(tmp_path / "int8")
    with torch.no_grad():
        assert torch.equal(reloaded(ids, use_cache=False).logits, near)
    assert torch.equal(
        reloaded.generate(ids, num_recurrences=2, **new),
        quantised.generate(ids, num_recurrences=2, **new),
    )
