"""MuonH against the reference's numbers, a float64 loop over single matrices, SVD and torch's AdamW."""

import json
from pathlib import Path

import pytest
import torch
from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import training.orthogonalise
from hf_looped import LoopedConfig, LoopedForCausalLM
from training.config import ModelConfig, OptimizerConfig, TransferConfig
from training.hyperp import learning_rates, parameter_groups, reference_tokens
from training.muonh import MuonH, orthogonalise

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
CASES = {
    "r1_unlooped": {"recurrences": 1, "effective_depth": 4, "shared_depth": 4},
    "r4_linear": {"recurrences": 4, "effective_depth": 10, "shared_depth": 8},
    "r4_hyperconnections": {
        "recurrences": 4,
        "effective_depth": 10,
        "shared_depth": 8,
        "injection": "hyperconnections",
        "num_lanes": 2,
    },
}
# Polar Express for five steps as FACTS quotes Amsel et al. 2025, typed in again here.
TRIPLES = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def relative(found, expected):
    return (torch.linalg.norm(found - expected) / torch.linalg.norm(expected)).item()


def muonh(parameters, lr=0.02, **fields):
    return MuonH([{"params": parameters, "algorithm": "muonh", "lr": lr}], **fields)


def matrices(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]


def set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def signs(name, weight, head_dim=16):
    """−1 for the rows of q and k that the reference, which rotates the other way, has negated."""
    rows = torch.arange(weight.shape[0]) % head_dim >= head_dim // 2
    turned = name.endswith(("q_proj.weight", "k_proj.weight"))
    return torch.where(rows & turned, -1.0, 1.0)[:, None] if turned else torch.tensor(1.0)


@pytest.mark.skipif(not REFERENCE.exists(), reason="the reference's numbers are not here")
@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_those_of_the_reference(case):
    """Its bf16 orthogonalisation differs from float32 by about 0.05 (its README); wrong coefficients by 0.18."""
    tensors = load_file(REFERENCE / f"{case}.safetensors")
    meta = json.loads((REFERENCE / "meta.json").read_text())[case]
    config = ModelConfig(hidden_size=32, head_dim=16, **CASES[case])
    model = LoopedForCausalLM(config.build(128, 24))
    before = {
        name.removeprefix("in."): value for name, value in tensors.items() if name.startswith("in.")
    }
    model.load_state_dict(
        {name: value * signs(name, value) for name, value in before.items()}, strict=True
    )
    optimizer, transfer = OptimizerConfig(), TransferConfig()
    tokens = round(reference_tokens(transfer, config))
    rates = learning_rates(optimizer, transfer, config, 262_144, tokens)
    groups = parameter_groups(model, rates, optimizer)

    expected = {(g["kind"], round(g["lr"], 9)) for g in meta["groups"]}
    names = {"muonh": "muon", "adamw": "adamw"}
    assert {(names[g["algorithm"]], round(g["lr"], 9)) for g in groups} == expected

    steps = MuonH(groups)
    for _ in range(3):
        model.zero_grad()
        logits = model(input_ids=tensors["x"], use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tensors["y"].flatten().long(), ignore_index=-1
        ).backward()
        steps.step()
    on_sphere = {id(p) for g in groups if g["algorithm"] == "muonh" for p in g["params"]}
    for name, parameter in model.named_parameters():
        after = parameter.detach() * signs(name, parameter)
        update, wanted = after - before[name], tensors[f"after3.{name}"] - before[name]
        bound = 0.1 if id(parameter) in on_sphere else 0.01
        assert relative(update, wanted) <= bound, name
        if id(parameter) in on_sphere:
            radius = torch.linalg.norm(before[name]).item()
            assert torch.linalg.norm(after).item() == pytest.approx(radius, rel=1e-5)


def spectrum(rows, columns, values, seed=0):
    """U·Σ·Vᵀ with given singular values, float64."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, rows, generator=generator, dtype=torch.float64))[0]
    return u, v, u @ torch.diag(values) @ v.T


def test_orthogonalise_keeps_singular_vectors_and_maps_values_by_the_scalar_polynomial():
    """In float64 the iteration acts on each singular value alone; 1e-10 is rounding over five steps."""
    values = torch.logspace(0, -2, 12, dtype=torch.float64)
    u, v, matrix = spectrum(12, 20, values)
    inside = u.T @ orthogonalise(matrix[None], torch.float64)[0] @ v
    expected = values / (1.02 * values.norm() + 1e-6)
    for a, b, c in TRIPLES:
        expected = a * expected + b * expected**3 + c * expected**5
    torch.testing.assert_close(inside, torch.diag(expected), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (16, 64), (32, 33)])
def test_singular_values_end_near_one(rows, columns):
    """Five steps bring values down to a 30th of the largest into [0.3, 1.2]."""
    u, v, matrix = spectrum(rows, columns, torch.logspace(0, -1.5, rows, dtype=torch.float64))
    found = torch.linalg.svdvals(orthogonalise(matrix[None].float(), torch.float32)[0])
    assert 0.3 < found.min() and found.max() < 1.2


def test_orthogonalise_treats_matrices_of_a_batch_alone_and_keeps_zero():
    batch = torch.stack([p.detach() for p in matrices(*[(6, 9)] * 4)])
    batch[2] = 0
    together = orthogonalise(batch, torch.float32)
    for one, matrix in zip(together, batch, strict=True):
        # Batched and single products may sum in another order.
        torch.testing.assert_close(
            one, orthogonalise(matrix[None], torch.float32)[0], rtol=1e-5, atol=1e-5
        )
    assert (together[2] == 0).all()


@pytest.mark.parametrize("shape", [(5, 24, 24), (5, 24, 36), (5, 24, 48), (3, 16, 100)])
def test_orthogonalise_equals_that_of_pytorch_optimizer_with_our_triples(shape):
    """Wide ones take another way (products of Gram matrices): rounding, amplified, as in `_by_gram_matrices`."""
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = zero_power_via_newton_schulz_5(
        batch, safety_factor=1.02, weights=TRIPLES, dtype=torch.float32
    )
    assert relative(orthogonalise(batch, torch.float32), expected) < 5e-5


@pytest.mark.parametrize("condition", [1e1, 1e4, 1e8])
def test_gram_matrices_give_the_plain_iteration_however_ill_conditioned(condition, monkeypatch):
    """Against float64's plain iteration: rounding of the largest value's square, 1e-7, times 2e5: 0.02 at worst."""
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), 32).double()
    matrix = spectrum(32, 128, values)[2][None]
    with monkeypatch.context() as patch:
        patch.setattr(training.orthogonalise, "_multiplies_exactly", lambda _: False)
        expected = orthogonalise(matrix, torch.float64)
    found = orthogonalise(matrix.float(), torch.float32)
    assert relative(found.double(), expected) < 0.02
    assert torch.linalg.svdvals(found[0]).max() < 1.2


@pytest.mark.parametrize(
    ("dtype", "precision", "exact"),
    [
        (torch.float32, "none", True),
        (torch.float32, "ieee", True),
        (torch.float32, "bf16", False),
        (torch.float32, "tf32", False),
        (torch.bfloat16, "none", False),
        (torch.float64, "bf16", True),
    ],
)
def test_gram_matrices_are_left_alone_where_products_are_rounded(
    dtype, precision, exact, monkeypatch
):
    """In bfloat16 they diverge; torch.set_float32_matmul_precision rounds float32 products as well."""
    calls, products = [], torch.backends.mkldnn.matmul
    monkeypatch.setattr(training.orthogonalise, "_by_gram_matrices", lambda x: calls.append(1) or x)
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        orthogonalise(torch.ones(1, 4, 16), dtype)
    finally:
        products.fp32_precision = before
    assert bool(calls) == exact


def test_bfloat16_orthogonalisation_is_near_that_of_float32():
    """bf16 keeps 8 bits; five steps amplify 2^-9 to a few per cent (0.05 in the docstring)."""
    batch = torch.stack([p.detach() for p in matrices(*[(32, 64)] * 3)])
    half = orthogonalise(batch, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert 0 < relative(half.float(), orthogonalise(batch, torch.float32)) < 0.1


def naive_step(weight, gradient, momentum, radius, lr, mu=0.95):
    """One matrix in float64 by the formulas; returns weight and momentum."""
    momentum = momentum + (1 - mu) * (gradient - momentum)
    x = gradient + mu * (momentum - gradient)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (1.02 * x.norm() + 1e-6)
    for a, b, c in TRIPLES:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.T if tall else x
    weight = weight - lr * x * radius / x.norm()
    return weight * radius / weight.norm(), momentum


def test_steps_equal_a_float64_loop_over_single_matrices():
    """19 of one oriented shape (three of them tall), squares, rows and columns; float32 rounding within 1e-4."""
    shapes = [(8, 20)] * 16 + [(20, 8)] * 3 + [(12, 12)] * 2 + [(4, 30), (1, 9), (9, 1)]
    parameters = matrices(*shapes)
    expected = [p.detach().double() for p in parameters]
    buffers = [torch.zeros_like(e) for e in expected]
    radii = [e.norm() for e in expected]
    optimizer = muonh(parameters)
    for step in range(5):
        set_gradients(parameters, step)
        lr = 0.05 / (step + 1)
        optimizer.param_groups[0]["lr"] = lr
        for i, parameter in enumerate(parameters):
            expected[i], buffers[i] = naive_step(
                expected[i], parameter.grad.double(), buffers[i], radii[i], lr
            )
        optimizer.step()
    start = matrices(*shapes)
    for parameter, wanted, first in zip(parameters, expected, start, strict=True):
        first = first.detach().double()
        assert relative(parameter.detach().double() - first, wanted - first) < 1e-4


def test_matrices_of_one_shape_share_a_call_as_far_as_they_fit_a_cache(monkeypatch):
    """Tall ones are turned; of 128 × 512 two are 2^17 elements, so five take three calls."""
    calls, real = [], training.muonh.orthogonalise

    def counting(batch, dtype):
        calls.append(tuple(batch.shape))
        return real(batch, dtype)

    monkeypatch.setattr(training.muonh, "orthogonalise", counting)
    parameters = matrices(*[(8, 20)] * 16, *[(20, 8)] * 4, *[(6, 6)] * 5, *[(512, 128)] * 5)
    set_gradients(parameters, 0)
    muonh(parameters).step()
    assert sorted(calls) == [(1, 128, 512), (2, 128, 512), (2, 128, 512), (5, 6, 6), (20, 8, 20)]


def test_frobenius_norms_stay_over_200_steps():
    """Rescaled to the cached radius every step, rounding cannot add up: 1e-5 (measured below 1e-6)."""
    parameters = matrices((16, 24), (24, 16), (10, 10))
    radii = [p.norm().item() for p in parameters]
    optimizer = muonh(parameters)
    for step in range(200):
        set_gradients(parameters, step)
        optimizer.step()
    for parameter, radius in zip(parameters, radii, strict=True):
        assert parameter.norm().item() == pytest.approx(radius, rel=1e-5)


@pytest.mark.parametrize("width", [4, 16, 64])
@pytest.mark.parametrize("lr", [0.3, 0.01])
def test_the_step_relative_to_the_weight_is_the_learning_rate_for_every_width(width, lr):
    """W lives in the left half and the gradient in the right, so the step can be read off the result."""
    (parameter,) = matrices((width, 2 * width))
    with torch.no_grad():
        parameter[:, width:] = 0
    set_gradients([parameter], 1)
    parameter.grad[:, :width] = 0
    muonh([parameter], lr=lr).step()
    step, weight = parameter[:, width:].norm(), parameter[:, :width].norm()
    assert (step / weight).item() == pytest.approx(lr, rel=1e-5)  # float32 rounding


def test_bfloat16_rounds_the_direction_and_neither_rate_nor_radius():
    """The reference multiplies them in bfloat16, which moves this rate, between two of its numbers, by 0.2 %.

    Here the direction alone is rounded, element by element; that its norm follows is up to chance, 6e-4 measured.
    """
    lr, width = 227.5 * 2**-14, 64
    (parameter,) = matrices((width, 2 * width))
    with torch.no_grad():
        parameter[:, width:] = 0
    set_gradients([parameter], 1)
    parameter.grad[:, :width] = 0
    radius = parameter.norm().item()
    muonh([parameter], lr=lr, orthogonalise_dtype=torch.bfloat16).step()
    step, weight = parameter[:, width:].norm(), parameter[:, :width].norm()
    assert (step / weight).item() == pytest.approx(lr, rel=1e-3)
    assert parameter.norm().item() == pytest.approx(radius, rel=1e-6)


def test_adamw_groups_equal_torch_adamw_without_decay():
    """Fused and plain kernels round apart by an ulp or so of each update: 1e-5."""
    ours, theirs = matrices((7, 5), (3,), seed=3), matrices((7, 5), (3,), seed=3)
    fields = {"betas": (0.8, 0.95), "eps": 1e-10}
    optimizer = MuonH([{"params": ours, "algorithm": "adamw", "lr": 0.1, **fields}])
    referee = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.0, foreach=False, **fields)
    for step in range(6):
        for group in (*optimizer.param_groups, *referee.param_groups):
            group["lr"] = 0.1 / (step + 1)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        referee.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["muonh", "adamw"])
def test_parameters_without_gradient_stay_untouched(algorithm):
    parameters = matrices((4, 6), (4, 6), (6, 4))
    before = [p.detach().clone() for p in parameters]
    optimizer = MuonH([{"params": parameters, "algorithm": algorithm, "lr": 0.1}])
    set_gradients(parameters[1:2], 0)
    optimizer.step()
    assert not torch.equal(parameters[1], before[1])
    for i in (0, 2):
        assert torch.equal(parameters[i], before[i])
        assert not optimizer.state[parameters[i]]


@pytest.mark.parametrize("algorithm", ["muonh", "adamw"])
def test_a_zero_gradient_moves_nothing(algorithm):
    """No NaN; a matrix is rescaled to its own norm, which may round (1e-6)."""
    parameters = matrices((4, 6), (6, 4))
    before = [p.detach().clone() for p in parameters]
    optimizer = MuonH([{"params": parameters, "algorithm": algorithm, "lr": 0.1}])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, was in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), was, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_rate_of_zero_makes_the_state_and_leaves_every_bit_of_the_weights(rate, steps):
    """As torch.distributed.checkpoint makes it; after some steps norms equal the radius only up to rounding."""
    parameters = matrices((4, 6), (6, 4), *[(5, 5)] * 20, (3, 7))
    optimizer = MuonH(
        [
            {"params": parameters[:-1], "algorithm": "muonh", "lr": 0.1},
            {"params": parameters[-1:], "algorithm": "adamw", "lr": 0.1},
        ]
    )
    set_gradients(parameters, 0)
    for _ in range(steps):
        optimizer.step()
    before = [p.detach().clone() for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    assert all(map(torch.equal, parameters, before))
    assert all(optimizer.state[parameter] for parameter in parameters)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_is_refused(value):
    (parameter,) = matrices((3, 5))
    parameter.grad = torch.ones(3, 5)
    with torch.no_grad():
        parameter[1, 2] = value
    with pytest.raises(ValueError, match=r"shape \(3, 5\) is not finite"):
        muonh([parameter]).step()


def test_a_zero_matrix_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3, 5))
    parameter.grad = torch.ones(3, 5)
    with pytest.raises(ValueError, match=r"shape \(3, 5\) is zero.*Initialise it"):
        muonh([parameter]).step()


@pytest.mark.parametrize(
    "tensor", [torch.ones(5), torch.ones(2, 3, 4), torch.ones(3, 5, dtype=torch.bfloat16)]
)
def test_what_is_no_float32_matrix_is_refused_for_muonh_but_fine_for_adamw(tensor):
    with pytest.raises(ValueError, match="float32 master weights.*'adamw' group"):
        muonh([torch.nn.Parameter(tensor)])
    MuonH([{"params": [torch.nn.Parameter(tensor)], "algorithm": "adamw", "lr": 0.1}])


def test_a_group_without_known_algorithm_is_refused():
    for fields in ({}, {"algorithm": "sgd"}):
        with pytest.raises(ValueError, match="a group needs 'muonh' or 'adamw'"):
            MuonH([{"params": matrices((3, 5)), "lr": 0.1, **fields}])


def test_state_dict_round_trip_goes_on_bit_for_bit(tmp_path):
    def build(parameters):
        return MuonH(
            [
                {"params": parameters[:3], "algorithm": "muonh", "lr": 0.05},
                {"params": parameters[3:], "algorithm": "adamw", "lr": 0.05},
            ]
        )

    def steps(optimizer, parameters, numbers):
        for number in numbers:
            set_gradients(parameters, number)
            optimizer.step()

    straight = matrices((4, 6), (6, 4), (5, 5), (7,))
    optimizer = build(straight)
    steps(optimizer, straight, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    copied = [torch.nn.Parameter(p.detach().clone()) for p in straight]
    resumed = build(copied)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    steps(optimizer, straight, range(3, 6))
    steps(resumed, copied, range(3, 6))
    for a, b in zip(straight, copied, strict=True):
        assert torch.equal(a, b)


def test_loading_keeps_momentum_and_radius_in_float32():
    """A checkpoint in bfloat16 loads as float32, and goes on with weights in float32 alone."""
    parameters = matrices((4, 6), (6, 4))
    optimizer = muonh(parameters)
    set_gradients(parameters, 0)
    optimizer.step()
    state = optimizer.state_dict()
    for values in state["state"].values():
        for key, value in values.items():
            values[key] = value.bfloat16()
    resumed = muonh(parameters)
    resumed.load_state_dict(state)
    for parameter in parameters:
        assert {v.dtype for v in resumed.state[parameter].values()} == {torch.float32}
    parameters[0].data = parameters[0].data.bfloat16()
    parameters[0].grad = None
    with pytest.raises(ValueError, match="float32 master weights"):
        resumed.step()


def test_matrices_that_become_flat_after_the_optimiser_was_made_are_refused():
    """As FSDP1 does, to shards without gradient too."""
    parameters = matrices((4, 6), (6, 4))
    optimizer = muonh(parameters)
    set_gradients(parameters[1:], 0)
    parameters[0].data = parameters[0].data.flatten()
    with pytest.raises(ValueError, match=r"shape \(24,\).*whole matrices.*fully_shard"):
        optimizer.step()


def trained(folder, seed, steps=6, resume=None):
    """Train a tiny looped model with the Trainer and a linear schedule; return model and log."""
    torch.manual_seed(seed)
    model = LoopedForCausalLM(ModelConfig(hidden_size=16, head_dim=8).build(64, 16)).train()
    rates = {"matrix": 0.02, "embedding": 0.1, "lm_head": 0.01, "norm": 0.01}
    optimizer = MuonH(parameter_groups(model, rates, OptimizerConfig()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (24, 16), generator=generator)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder),
            max_steps=steps,
            save_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        optimizers=(optimizer, schedule),
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer.state.log_history


def test_the_trainer_follows_the_schedule_saves_and_resumes_to_the_same_bits(tmp_path):
    """Six steps at once, and three and three by a model and an optimiser of another seed."""
    whole, history = trained(tmp_path, seed=0)
    resumed, _ = trained(tmp_path, seed=1, resume=str(tmp_path / "checkpoint-3"))
    assert [entry["learning_rate"] for entry in history if "loss" in entry] == pytest.approx(
        [0.02 * (1 - step / 8) for step in range(6)]
    )
    for (name, weight), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned():
    (parameter,) = matrices((3, 5))
    optimizer = muonh([parameter])

    def closure():
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss.item()

    before = parameter.detach().clone()
    assert optimizer.step(closure) == pytest.approx((before**2).sum().item())
    assert not torch.equal(parameter, before)


def test_the_config_of_the_reference_cases_is_the_family_the_trainer_builds():
    """What `iso_depth` makes of the cases' numbers is the layer counts that the reference says."""
    meta = {"r1_unlooped": (0, 4, 0), "r4_linear": (1, 2, 1), "r4_hyperconnections": (1, 2, 1)}
    for case, layers in meta.items():
        config = ModelConfig(hidden_size=32, head_dim=16, **CASES[case]).build(128, 24)
        assert isinstance(config, LoopedConfig)
        found = (config.num_prelude_layers, config.num_recurrent_layers, config.num_coda_layers)
        assert found == layers
