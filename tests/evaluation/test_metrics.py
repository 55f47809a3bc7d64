"""Losses are ratios of sums; their standard error is that of many repetitions."""

from pathlib import Path

import numpy as np
import pytest

from evaluation.metrics import bits_per_byte, nll_per_token, nll_per_token_stderr, total

ROOT = Path(__file__).parents[2]


def draw(generator, many):
    counts = generator.integers(1, 9, many)
    nats = counts * 2.0 + generator.normal(0, 1.5, many) * counts**0.5
    return list(zip(nats.tolist(), counts.tolist(), strict=True))


def test_long_documents_count_by_their_tokens():
    assert nll_per_token([(2.0, 1), (3.0, 9)]) == pytest.approx(0.5)
    assert bits_per_byte([(np.log(2) * 12, 4)]) == pytest.approx(3.0)
    assert total([1.0, 2.0]) == 3.0


def test_the_standard_error_is_the_spread_over_repetitions():
    """2,000 repetitions of 200 documents: the spread is known to 2 %, the mean estimate better."""
    generator = np.random.default_rng(0)
    sets = [draw(generator, 200) for _ in range(2000)]
    spread = np.std([nll_per_token(one) for one in sets])
    assert np.mean([nll_per_token_stderr(one) for one in sets]) == pytest.approx(spread, rel=0.06)
    assert np.isnan(nll_per_token_stderr([(1.0, 2)]))


@pytest.mark.filterwarnings("ignore")
def test_the_module_of_evaluate_computes_the_same(tmp_path):
    import evaluate

    metric = evaluate.load(str(ROOT / "evaluation" / "nll_per_token"), cache_dir=str(tmp_path))
    parts = draw(np.random.default_rng(1), 50)
    nats, counts = (list(each) for each in zip(*parts, strict=True))
    found = metric.compute(predictions=nats, references=counts)
    assert found["nll_per_token"] == pytest.approx(nll_per_token(parts), rel=1e-12)
    assert found["stderr"] == pytest.approx(nll_per_token_stderr(parts), rel=1e-12)
    assert found["tokens"] == sum(counts)
    with pytest.raises(ValueError, match="has 0 tokens"):
        metric.compute(predictions=[1.0], references=[0])
