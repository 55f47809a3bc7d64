"""Tiny models whose every weight matters: gains, scalars and the LM head are moved away from their initial values."""

import pytest
import torch

from hf_looped import LoopedConfig, LoopedForCausalLM


@pytest.fixture(scope="session")
def tiny_config():
    """Config of 1 + 2·3 + 1 executed layers, two heads of 16 channels, 64 tokens; any field can be replaced."""

    def build(**fields):
        defaults = {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_prelude_layers": 1,
            "num_recurrent_layers": 2,
            "num_coda_layers": 1,
            "num_recurrences": 3,
            "max_position_embeddings": 64,
        }
        return LoopedConfig(**(defaults | fields))

    return build


@pytest.fixture(scope="session")
def tiny_model(tiny_config):
    """Model in eval mode with seeded weights; gains, the injection and the LM head are perturbed.

    The initial LM head has a standard deviation of 0.001, which would hide errors behind any absolute tolerance.
    """

    def build(attention="sdpa", seed=0, **fields):
        config = tiny_config(**fields)
        config._attn_implementation = attention
        torch.manual_seed(seed)
        model = LoopedForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "injection" in name:
                    parameter += 0.2 * torch.randn_like(parameter)
            if not config.tie_word_embeddings:
                model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight) / 2)
        return model.eval()

    return build


@pytest.fixture
def tokens():
    """Random token ids [rows, length] below 64."""

    def draw(rows=2, length=12, seed=0):
        return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))

    return draw


class InertStream:
    """Stand-in for a CUDA stream: Transformers' offloading code runs on a CPU, where nothing is concurrent."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.fixture
def inert_streams(monkeypatch):
    monkeypatch.setattr(torch, "Stream", InertStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: InertStream())
