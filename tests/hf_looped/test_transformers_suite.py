"""Transformers' own common tests on our model: it passes all that Transformers' Llama passes.

The wheel of Transformers has no tests; its source distribution has the common ones. They are fetched with pip into
pytest's cache, once a version, and run by `transformers_suite.py` in a process with their own warning filters.
Each injection runs at r = 1, 2, 3 and each cache budget (1, r and between) with the linear injection. The tests with
several processes (FSDP2, tensor parallelism) run for the paper's model and for the one most unlike it.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import pytest
import transformers

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1800)]

INJECTIONS = ("linear", "additive", "passthrough", "hyperconnections")
MODELS = [
    *((injection, r, None) for injection in INJECTIONS for r in (1, 2, 3)),
    *(("linear", r, m) for r, m in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3))),
]
DISTRIBUTED = [("linear", 2, None), ("hyperconnections", 3, 1)]

# Upstream's reason for a skip, the tests that may give it, and why it is right for this model.
EXPECTED_SKIPS = [
    (
        r"requires (accelerator|multiple accelerators|MPS|deepspeed|the kernels library|torchao)"
        r"|requires Flash Attention( \d)?",
        r".*",
        "needs another device or a package that is no dependency of ours",
    ),
    (r"is slow", r"torch_compile_for_training", "needs an accelerator too"),
    (
        r"[Nn]ot (a )?composite|No subconfigs",
        r".*composite.*|internal_model_config_and_subconfig_are_same",
        "for models of several parts, such as vision and text",
    ),
    (
        r"does not support SDPA",
        r"sdpa_can_dispatch_composite_models",
        "as before; the reason that upstream gives is another test's",
    ),
    (
        r"does not support grouped_mm|no sparse experts|no `output_router_logits`|Not an MoE"
        r"|expert parallel plan",
        r".*(grouped|moe|router|expert).*",
        "for mixtures of experts",
    ),
    (r"No sequence-to-sequence", r"encoder_decoder.*", "for encoder-decoder models"),
    (
        r"No conversion found",
        r"can_load_from_already_mapped_keys|reverse_loading_mapping",
        "checkpoints have the module's own names, nothing is renamed on loading",
    ),
    (r"_keep_in_fp32_modules", r"keep_in_fp32.*", "no module is kept in float32"),
    (r"position embeddings", r"resize_position_vector_embeddings", "positions are rotary"),
    (r"axial RoPE", r"vision_axial_rope", "for images"),
    (r"partial rope", r"model_rope_with_partial_rotation", "whole heads are rotated"),
    (r"sliding window", r"sliding_window_mask", "attention reaches over the whole sequence"),
]


@pytest.fixture(scope="session")
def upstream(pytestconfig):
    """Folder with upstream's common tests as the package transformers_tests, and what they import."""
    cached = pytestconfig.cache.mkdir("transformers-tests") / transformers.__version__
    if not cached.exists():
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            try:
                fetch(Path(folder))
            except subprocess.CalledProcessError as error:
                last = (error.stderr.strip() or "no message").splitlines()[-1]
                pytest.skip(
                    f"the tests of transformers {transformers.__version__} can't be fetched: {last}"
                )
            (Path(folder) / "suite").rename(cached)
    return cached


def fetch(folder: Path) -> None:
    """Download the source distribution and parameterized, and lay out `folder`/suite."""
    source = f"transformers=={transformers.__version__}"
    pip("download", "--no-binary=transformers", "--no-build-isolation", f"--dest={folder}", source)
    package = folder / "suite" / "transformers_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
        for member in archive.getmembers():
            path = PurePosixPath(member.name)
            if path.match("transformers-*/tests/test_*.py"):
                (package / path.name).write_bytes(archive.extractfile(member).read())
    pip("install", f"--target={folder / 'suite'}", "parameterized>=0.9")


def pip(verb: str, *args: str) -> None:
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--no-deps", "--retries=1", *args]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="session")
def results(upstream, tmp_path_factory):
    """Function that runs a class of the suite and returns, for each of its tests, outcome and messages."""

    @cache
    def run(name: str, injection: str, r: int, m: int | None) -> dict[str, tuple[str, list[str]]]:
        here = Path(__file__).parent
        fields = {"injection": injection, "num_recurrences": r, "num_cached_recurrences": m}
        folder = tmp_path_factory.mktemp("suite")
        command = [
            *(sys.executable, "-m", "pytest", f"{here / 'transformers_suite.py'}::{name}"),
            *("-c", os.devnull, "--rootdir", here, "--noconftest", "-p", "no:cacheprovider"),
            *("--junitxml", folder / "results.xml", "-o", "junit_family=xunit2"),
            # asks whether upstream's generation tests are there; the source distribution lacks them
            *("-k", "not test_generation_tester_mixin_inheritance"),
        ]
        environment = os.environ | {
            "LOOPED_FIELDS": json.dumps(fields),
            "PYTHONPATH": os.pathsep.join(map(str, (upstream, here, here.parents[1]))),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 1), (done.stdout + done.stderr)[-4000:]  # 1: a test failed
        cases = ElementTree.parse(folder / "results.xml").iter("testcase")
        return {case.get("name").removeprefix("test_"): outcome(case) for case in cases}

    return run


def outcome(case: ElementTree.Element) -> tuple[str, list[str]]:
    """Worst outcome among a test and its subtests, and the messages that belong to it."""
    for kind, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",))):
        messages = [child.get("message") for child in case if child.tag in tags]
        if messages:
            return kind, messages
    return "passed", []


def named(results: dict, kind: str) -> dict[str, list[str]]:
    return {name: messages for name, (found, messages) in results.items() if found == kind}


def unexpected_skips(results: dict) -> dict[str, list[str]]:
    """Skips whose reason is not in the table, or not for that test."""

    def expected(name: str, message: str) -> bool:
        return any(
            re.search(reason, message) and re.fullmatch(allowed, name)
            for reason, allowed, _ in EXPECTED_SKIPS
        )

    return {
        name: messages
        for name, messages in named(results, "skipped").items()
        if not all(expected(name, message) for message in messages)
    }


each_model = pytest.mark.parametrize(("injection", "r", "m"), MODELS)
each_distributed = pytest.mark.parametrize(("injection", "r", "m"), DISTRIBUTED)


@each_model
def test_our_model_fails_no_common_test_and_passes_all_that_llama_passes(results, injection, r, m):
    ours = results("LoopedCommonTest", injection, r, m)
    llama = results("LlamaCommonTest", "linear", 1, None)
    assert not named(ours, "failed")
    assert not named(llama, "failed")
    assert len(named(llama, "passed")) > 100
    assert named(llama, "passed").keys() <= named(ours, "passed").keys()


@each_model
def test_common_tests_are_skipped_for_expected_reasons_only(results, injection, r, m):
    assert not unexpected_skips(results("LoopedCommonTest", injection, r, m))


@each_distributed
def test_our_model_passes_every_distributed_test_of_a_dense_model(results, injection, r, m):
    """Tensor parallelism and FSDP2, on processes that talk through gloo."""
    ours = results("LoopedDistributedTest", injection, r, m)
    assert not named(ours, "failed")
    assert not unexpected_skips(ours)
    parallel = {name.split("_")[0] for name in named(ours, "passed")}
    assert parallel == {"tp", "fsdp", "fsdp2", "hsdp"}
