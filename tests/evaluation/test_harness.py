"""lm-eval's own model on the same task files, its groups, its caches, and several processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from evaluation.run import YAML, load_task, run_task, settings_of
from evaluation.suite import AXES, GROUPS, TASKS, VERSION

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tools, byte_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tools.make_llama().save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["svamp", "lambada_openai", "arc_easy"])
def test_lm_evals_own_model_gives_the_same_numbers(tools, checkpoint, byte_tokenizer, data, task):
    """Its one-token choices and caches apart it computes the same: 1e-6."""
    stock = HFLM(
        str(checkpoint),
        device="cpu",
        add_bos_token=True,
        softmax_dtype="float32",
        batch_size=4,
        max_length=2048,
    )
    metadata = {"data_dir": str(data), "pretrained": str(checkpoint)}
    manager = TaskManager(include_path=str(YAML), include_defaults=False, metadata=metadata)
    found = evaluate(stock, manager.load([f"looped_{task}"]), log_samples=False, bootstrap_iters=1)
    theirs = found["results"][f"looped_{task}"]
    settings = settings_of(task, data, None, "whole")
    lm = tools.loaded(tools.make_llama(), byte_tokenizer, max_length=2048)
    ours = run_task(lm, load_task(task, data, "whole"), settings)
    for key, name in (
        ("nll_per_token", "loss"),
        ("nll_per_token_stderr", "loss_stderr"),
        ("acc", "accuracy"),
        ("bits_per_byte", "bits_per_byte"),
        ("tokens", "tokens"),
    ):
        assert theirs[f"{key},none"] == pytest.approx(ours[name], rel=1e-6)


def test_every_task_and_group_of_the_suite_has_its_file():
    manager = TaskManager(include_path=str(YAML), include_defaults=False)
    assert set(manager.all_tasks) == {f"looped_{name}" for name in TASKS} | set(GROUPS)
    assert [len(AXES[axis]) for axis in AXES] == [5, 5, 3, 5, 4]
    assert len(GROUPS["looped_core"]) == 18 and len(GROUPS["looped_extra"]) == 2
    for path in YAML.glob("*.yaml"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines[0].startswith("include"):
            name = path.stem
            assert lines[1] == f"task: looped_{name}"
            assert lines[2] == f"num_fewshot: {TASKS[name].shots}"
        else:
            members = [line[4:] for line in lines if line.startswith("  - looped_")]
            assert members == [f"looped_{name}" for name in GROUPS[path.stem]]


def test_an_axis_is_the_mean_of_its_tasks_in_lm_eval_too(tools, llama, byte_tokenizer, tmp_path):
    from evaluation.prepare import prepare

    prepare(tmp_path, AXES["looped_var_assign"])
    manager = TaskManager(
        include_path=str(YAML), include_defaults=False, metadata={"data_dir": str(tmp_path)}
    )
    lm = tools.loaded(llama, byte_tokenizer)
    loaded = manager.load(["looped_var_assign"])
    found = evaluate(lm, loaded, limit=4, log_samples=False, bootstrap_iters=0)
    losses = [
        found["results"][f"looped_{name}"]["nll_per_token,none"]
        for name in AXES["looped_var_assign"]
    ]
    group = found["groups"]["looped_var_assign"]["nll_per_token,none"]
    assert group == pytest.approx(sum(losses) / 4, rel=1e-12)


def test_lm_evals_cache_of_results_is_refused(tools, llama, byte_tokenizer, tmp_path):
    from lm_eval.api.model import CachingLM

    with pytest.raises(ValueError, match="use_cache.*does not know model, revision"):
        CachingLM(tools.loaded(llama, byte_tokenizer), str(tmp_path / "cache.db"))


def test_the_command_starts_without_lm_evals_own_tasks(checkpoint, data):
    """Its index alone takes 16 s and holds no `looped_` name: ours are all that is known."""
    task = load_task("svamp", data, None)
    assert task.config.task == "looped_svamp"
    assert len(task.eval_docs) == 40
    assert task.config.metadata["version"] == VERSION


def launched(processes, *options):
    """Run the command with that many processes; it must succeed. Returns what it printed."""
    launch = []
    if processes > 1:
        port = str(29500 + os.getpid() % 1000)
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        launch += ["--master_port", port]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "evaluation", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def assert_same(one, many, processes):
    """Sums are exact (fsum), batches differ: 1e-6. Counts and accuracies are equal."""
    assert many["processes"] == processes
    for name in ("tokens", "documents", "accuracy", "truncated", "merged"):
        assert many[name] == one[name]
    for name in ("loss", "loss_stderr", "bits_per_byte"):
        assert many[name] == pytest.approx(one[name], rel=1e-6)


@pytest.mark.parametrize("processes", [2])
def test_several_processes_give_the_results_of_one(checkpoint, data, tmp_path, processes):
    results = {}
    for number in (1, processes):
        out = tmp_path / f"{number}.json"
        launched(
            number, "--model", str(checkpoint), "--data", str(data), "--tasks", "svamp", "arc_easy",
            "--limit", "15", "--out", str(out),
        )  # fmt: skip
        (results[number],) = json.loads(out.read_text())["evaluations"].values()
    for task in ("svamp", "arc_easy"):
        assert_same(results[1][task], results[processes][task], processes)


def test_several_processes_score_a_folder_of_runs(checkpoint, data, tmp_path):
    """Only the first process reads and prints results, which are not there before it writes them."""
    for number in (1, 2):
        folder = tmp_path / str(number) / "run"
        shutil.copytree(checkpoint, folder / "checkpoint")
        (folder / "run.json").write_text(json.dumps({"run_id": "run", "recurrences": 1}))
        config = json.loads((folder / "checkpoint" / "config.json").read_text())
        assert "num_recurrences" not in config  # an unlooped model
        text = launched(
            number, "--runs", str(tmp_path / str(number)), "--data", str(data),
            "--tasks", "svamp", "--limit", "15",
        )  # fmt: skip
        assert text.count("looped_svamp") == 1 and text.count("1 to do") == 1
    one, two = (
        json.loads((tmp_path / name / "run" / "evaluation.json").read_text()) for name in "12"
    )
    assert_same(
        one["evaluations"]["checkpoint, r = 1"]["svamp"],
        two["evaluations"]["checkpoint, r = 1"]["svamp"],
        2,
    )
