"""What README.md tells a reader to type works."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import set_seed

from hf_looped import LoopedConfig, LoopedForCausalLM
from training.grid import load_grid
from training.tokenizer import train_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]


def test_every_make_target_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", README))
    assert named >= {"demo", "test", "venv"}
    assert named <= targets


def test_every_file_named_exists():
    named = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"--config (\S+\.yaml)", README)
    local = [name for name in named if not name.startswith("http")]
    assert len(local) >= 4
    assert [name for name in local if not (ROOT / name).exists()] == []


def test_every_grid_named_exists():
    named = re.findall(r"--grid ([a-z-]+)", README)
    assert named
    for name in named:
        assert load_grid(name).budgets


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.startswith("python -m scaling") and "fixtures" in c]
)
def test_the_commands_on_the_papers_runs_work(command, tmp_path):
    words = shlex.split(command)[1:]
    words = [str(ROOT / word) if word.startswith("tests/") else word for word in words]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if " fit " in command:
        assert "φ = 0.4586" in done.stdout  # as the README says


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model and tokenizer, as a run leaves them."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer(["Return the sum of two numbers."] * 50, vocab_size=300)
    set_seed(0)
    config = LoopedConfig.iso_depth(
        32,
        4,
        effective_depth=6,
        shared_depth=4,
        head_dim=16,
        vocab_size=320,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LoopedForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_example(number: int, checkpoint: Path) -> dict[str, object]:
    """Run the README's Python example of that number on a checkpoint; return its names."""
    example = blocks("python")[number]
    example = re.sub(r'folder = ".*"', f"folder = {str(checkpoint)!r}", example)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)  # the example is our own text
    return names


def test_the_example_of_loading_writes_text_and_returns_logits_and_states(checkpoint, capsys):
    names = run_example(0, checkpoint)
    logits, states = names["logits"], names["states"]
    assert isinstance(logits, torch.Tensor) and isinstance(states, tuple)
    assert logits.shape[-1] == 320
    assert len(states) == 4 and states[0].shape[-1] == 32
    assert "Return the sum of" in capsys.readouterr().out


def test_the_example_of_sharing_writes_a_folder_with_its_code(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_example(1, checkpoint)
    assert (tmp_path / "shared_model" / "modeling_looped.py").exists()
    assert len(blocks("python")) == 2
