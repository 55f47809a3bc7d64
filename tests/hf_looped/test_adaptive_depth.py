"""Adaptive depth against the naive loop fed token by token, and against full depth."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache

from hf_looped import AdaptiveDepth
from hf_looped.accounting import forward_flops_per_token

ROUNDING = {
    "rtol": 0,
    "atol": 2e-4,
}  # float32 logits up to 15 after up to some twenty layers, against float64
ENTRIES = {
    "linear": {},
    "random state, grouped queries": {
        "state_init": "normal",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "additive": {"injection": "additive"},
    "diagonal, no coda": {"injection": "diagonal", "num_coda_layers": 0},
    "hyperconnections": {"injection": "hyperconnections", "num_lanes": 3},
    "adapters": {"adapter_rank": 2},
    "time": {"time_conditioning": True},
    "gate": {"exit_gate": True},
}
each_entry = pytest.mark.parametrize("fields", ENTRIES.values(), ids=ENTRIES)
R = 5


@pytest.fixture
def deep_model(tiny_model):
    """Model with five recurrences."""

    def build(**fields):
        return tiny_model(num_recurrences=R, **fields)

    return build


def naive_rule(loop, depth):
    """stops(new, old, t) of the naive loop for the gate or the change of a token's state [1, D]."""
    left = 1.0

    def stops(new, old, t):
        nonlocal left
        if depth.criterion == "change":
            return np.linalg.norm(new - old) / np.linalg.norm(new) < depth.threshold
        weights = loop.weights
        gate = (new @ weights["model.exit_gate.weight"].T + weights["model.exit_gate.bias"]).item()
        left = (left if t else 1.0) * (1 - 1 / (1 + np.exp(-gate)))
        return left < depth.threshold

    return stops


def naive_adaptive(naive, model, rows, depth, r=R):
    """Logits [B, T, V] and recurrences used [B, T] of the naive loop, each row token by token."""
    logits, used = [], []
    for row in rows.tolist():
        loop = naive.Loop(model)
        one, counts = loop.call_adaptively(row, r, naive_rule(loop, depth))
        logits.append(one)
        used.append(counts)
    return torch.tensor(np.stack(logits), dtype=torch.float), torch.tensor(used)


def middle(model, tokens, criterion):
    """A threshold by which tokens stop at as many recurrences as possible, where rounding decides nothing."""
    with torch.no_grad():
        states = model.model(tokens, output_recurrent_states=True, use_cache=False).recurrent_states
        if criterion == "gate":
            stay = [torch.sigmoid(-model.model.exit_gate(state)) for state in states]
            measures = torch.stack(stay).cumprod(0)
        else:
            pairs = zip(states, states[1:], strict=False)
            measures = torch.cat([(b - a).norm(dim=-1) / b.norm(dim=-1) for a, b in pairs])
        ordered = measures.flatten().sort().values
        gaps = ordered.diff()
        middles = (ordered[:-1] + gaps / 2)[gaps > 1e-4]
        counts = {}
        for threshold in middles[:: max(1, len(middles) // 20)].tolist():
            depth = AdaptiveDepth(criterion=criterion, threshold=threshold)
            used = model(tokens, adaptive_depth=depth, use_cache=False).recurrences_used
            counts[threshold] = len(used.unique())
    return max(counts, key=lambda threshold: counts[threshold])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@each_entry
def test_logits_and_counts_are_those_of_the_naive_loop_token_by_token(
    naive, deep_model, tokens, attention, fields
):
    """In one call, in chunks on a cache, and with single tokens; with early exits at several recurrences."""
    model, x = deep_model(attention=attention, **fields), tokens()
    criterion = "gate" if model.config.exit_gate else "change"
    depth = AdaptiveDepth(criterion=criterion, threshold=middle(model, x, criterion))
    expected, counts = naive_adaptive(naive, model, x, depth)
    assert len(counts.unique()) > 1  # or nothing is tested
    with torch.no_grad():
        whole = model(x, adaptive_depth=depth, use_cache=False)
    torch.testing.assert_close(whole.logits, expected, **ROUNDING)
    assert torch.equal(whole.recurrences_used, counts)
    for lengths in ([7, 5], [4] + [1] * 8):
        cache, logits = DynamicCache(), []
        for part in x.split(lengths, dim=1):
            with torch.no_grad():
                logits.append(model(part, cache=cache, adaptive_depth=depth).logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, **ROUNDING)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_single_tokens_on_a_budget_of_slots_are_those_of_the_naive_loop(
    naive, deep_model, tokens, m
):
    model, x = deep_model(num_cached_recurrences=m), tokens()
    depth = AdaptiveDepth(criterion="change", threshold=middle(model, x, "change"))
    expected, counts = naive_adaptive(naive, model, x, depth)
    assert len(counts.unique()) > 1
    cache, logits = DynamicCache(), []
    for part in x.split(1, dim=1):
        with torch.no_grad():
            logits.append(model(part, cache=cache, adaptive_depth=depth).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, **ROUNDING)


def test_a_static_cache_and_padding_on_the_left_change_no_logits(naive, deep_model, tokens):
    model, x = deep_model(), tokens()
    depth = AdaptiveDepth(criterion="change", threshold=middle(model, x, "change"))
    expected, counts = naive_adaptive(naive, model, x, depth)
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        parts = [model(part, cache=cache, adaptive_depth=depth) for part in x.split([9, 3], dim=1)]
    torch.testing.assert_close(torch.cat([p.logits for p in parts], dim=1), expected, **ROUNDING)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), x), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(padded, attention_mask=mask, position_ids=positions, adaptive_depth=depth)
    torch.testing.assert_close(output.logits[:, 3:], expected, **ROUNDING)
    assert torch.equal(output.recurrences_used[:, 3:], counts)
    assert (output.recurrences_used[:, :3] == 1).all()


@pytest.mark.parametrize("per", ["token", "sequence"])
@pytest.mark.parametrize("criterion", ["gate", "change", "kl"])
@each_entry
def test_threshold_0_is_full_depth_bit_for_bit(deep_model, tokens, fields, criterion, per):
    model, x = deep_model(**(fields | {"exit_gate": True})), tokens()
    depth = AdaptiveDepth(criterion=criterion, threshold=0.0, per=per)
    caches = [DynamicCache(), DynamicCache()]
    with torch.no_grad():
        for part in x.split([8, 1, 3], dim=1):
            adaptive = model(part, cache=caches[0], adaptive_depth=depth)
            assert torch.equal(adaptive.logits, model(part, cache=caches[1]).logits)
            assert (adaptive.recurrences_used == R).all()


@pytest.mark.parametrize("criterion", ["gate", "change", "kl"])
def test_the_largest_thresholds_stop_at_the_first_chance(deep_model, tokens, criterion):
    """After one recurrence; after two by predictions, which need one to compare with."""
    model, x = deep_model(exit_gate=True), tokens()
    threshold = 1 - 1e-9 if criterion == "gate" else 1e9
    with torch.no_grad():
        output = model(x, adaptive_depth=AdaptiveDepth(criterion=criterion, threshold=threshold))
        first = model(x, num_recurrences=1)
    stopped = 2 if criterion == "kl" else 1
    assert (output.recurrences_used == stopped).all()
    if criterion != "kl":
        torch.testing.assert_close(output.logits, first.logits, **ROUNDING)


def test_predictions_stop_where_their_divergence_says(deep_model, tokens):
    """One token a call, so that what others did cannot matter: the divergence from calls with 1, 2, … recurrences."""
    model, x = deep_model(), tokens(rows=6, length=1)
    with torch.no_grad():
        logp = [
            model(x, num_recurrences=t + 1, use_cache=False).logits.log_softmax(-1)[:, 0]
            for t in range(R)
        ]
        kl = torch.stack(
            [(new.exp() * (new - old)).sum(-1) for old, new in zip(logp, logp[1:], strict=False)]
        )
        threshold = kl.median().item() * 1.001
        output = model(x, adaptive_depth=AdaptiveDepth(criterion="kl", threshold=threshold))
    below = kl[:-1] < threshold  # after recurrences 2 … R − 1
    expected = torch.where(below.any(0), below.float().argmax(0) + 2, R)
    assert len(expected.unique()) > 1
    assert torch.equal(output.recurrences_used[:, 0], expected)
    for row, count in enumerate(expected.tolist()):
        torch.testing.assert_close(
            output.logits[row, 0].log_softmax(-1), logp[count - 1][row], **ROUNDING
        )


def test_a_sequence_stops_as_one_by_the_mean_over_its_tokens(deep_model, tokens):
    """Rows alone and together: recurrences from the mean change of full-depth states, logits of so many recurrences."""
    model, x = deep_model(), tokens(rows=5, length=6)
    with torch.no_grad():
        out = model.model(x, output_recurrent_states=True)
        states = list(out.recurrent_states)
        changes = torch.stack(
            [
                ((b - a).norm(dim=-1) / b.norm(dim=-1)).mean(1)
                for a, b in zip(states, states[1:], strict=False)
            ]
        )  # after recurrences 2 … R
        threshold = changes[:-1].median().item() * 1.001
        depth = AdaptiveDepth(criterion="change", threshold=threshold, per="sequence")
        output = model(x, adaptive_depth=depth)
    below = changes[:-1] < threshold
    expected = torch.where(below.any(0), below.float().argmax(0) + 2, R)
    assert len(expected.unique()) > 1
    assert torch.equal(output.recurrences_used, expected[:, None].expand(-1, 6))
    for row, count in enumerate(expected.tolist()):
        with torch.no_grad():
            alone = model(x[row : row + 1], num_recurrences=count).logits[0]
        torch.testing.assert_close(output.logits[row], alone, **ROUNDING)


@pytest.mark.parametrize("padding", [0, 3])
def test_generate_is_greedy_over_adaptive_calls_and_says_what_it_used(
    naive, deep_model, tokens, padding
):
    """Against the naive loop's tokens, whose depth is the same token by token."""
    model, x = deep_model(), tokens(rows=1, length=6)
    depth = AdaptiveDepth(criterion="change", threshold=middle(model, tokens(), "change"))
    prompt = torch.cat((torch.zeros(1, padding, dtype=torch.long), x), dim=1)
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    output = model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        adaptive_depth=depth,
        pad_token_id=0,
    )
    loop = naive.Loop(model)
    rule = naive_rule(loop, depth)
    logits, used = loop.call_adaptively(x[0].tolist(), R, rule)
    new = []
    for _ in range(6):
        new.append(int(logits[-1].argmax()))
        logits, one = loop.call_adaptively(new[-1:], R, rule)
        used += one
    assert output[0, padding + 6 :].tolist() == new
    counts = torch.cat(depth.used, dim=1)[0, padding:]
    assert counts.tolist() == used[: len(counts)]


@pytest.mark.parametrize(
    ("criterion", "per"), [("change", "token"), ("gate", "sequence"), ("kl", "token")]
)
def test_compute_is_saved_and_not_only_outputs_chosen(deep_model, tokens, criterion, per):
    """Matrix products counted by PyTorch as they run, prefill and single tokens."""
    model = deep_model(exit_gate=True, num_recurrent_layers=3)
    threshold = 1 - 1e-9 if criterion == "gate" else 1e9
    flops = {}
    for x in (tokens(rows=3, length=16), tokens(rows=3, length=1)):
        for name, depth in (
            ("early", AdaptiveDepth(criterion=criterion, threshold=threshold, per=per)),
            ("full", None),
        ):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                model(x, adaptive_depth=depth, use_cache=False)
            flops[name] = counter.get_total_flops()
        assert flops["early"] < 0.7 * flops["full"]


def test_flops_of_a_call_are_those_of_its_mean_recurrences(deep_model, tokens):
    """One row of single tokens a call, so that nothing is padded: the counter's products, gains aside."""
    model = deep_model(num_recurrent_layers=3, attention="eager")
    x = tokens(rows=4, length=1)
    depth = AdaptiveDepth(criterion="change", threshold=middle(model, x, "change"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        used = model(x, adaptive_depth=depth, use_cache=False).recurrences_used.double()
    gains = 4 * 32 * (model.config.num_prelude_layers + model.config.num_coda_layers)
    gains += 4 * 32 * 3 * used.mean().item()
    counted = counter.get_total_flops() / 4 + gains
    assert len(used.unique()) > 1
    # attention's products are of one key
    assert counted == pytest.approx(forward_flops_per_token(model.config, 1, used.mean().item()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"criterion": "entropy", "threshold": 0.1},
            "criterion is 'entropy': use one of gate, change",
        ),
        ({"criterion": "gate", "threshold": 1.0}, r"threshold is 1.0: .* in \[0, 1\); 0 never"),
        ({"criterion": "change", "threshold": -0.1}, r"threshold is -0.1: .* in \[0, inf\)"),
        ({"criterion": "kl", "threshold": float("nan")}, "threshold is nan"),
        ({"criterion": "kl", "threshold": float("inf")}, "threshold is inf"),
        ({"criterion": "kl", "threshold": 0.1, "per": "layer"}, "per is 'layer': use one of token"),
    ],
)
def test_a_rule_out_of_range_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveDepth(**fields)


def test_adaptive_depth_is_refused_where_it_would_mean_nothing(deep_model, tokens):
    change = AdaptiveDepth(criterion="change", threshold=0.1)
    model, x = deep_model(), tokens()
    with pytest.raises(ValueError, match="has no exit gate"):
        model(x, adaptive_depth=AdaptiveDepth(criterion="gate", threshold=0.1))
    with pytest.raises(ValueError, match="needs an LM head"):
        model.model(x, adaptive_depth=AdaptiveDepth(criterion="kl", threshold=0.1))
    with pytest.raises(ValueError, match="exclude each other"):
        model(x, adaptive_depth=change, output_recurrent_states=True)
    with pytest.raises(ValueError, match="num_recurrences is 0: at least one"):
        model(x, adaptive_depth=change, num_recurrences=0)
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        model.train()(x, adaptive_depth=change)
