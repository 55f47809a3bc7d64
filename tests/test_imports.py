"""Who may import whom, what the wheel holds, and that no path of a developer's machine is left in the sources."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {  # other folders, or single modules of them
    "hf_looped": set(),
    "scaling": set(),
    "training": {"hf_looped", "scaling.runs"},
    "evaluation": {"hf_looped", "scaling.runs"},
    "model_cards": {"hf_looped", "scaling"},
}
OUTSIDE = {("evaluation", "tasks/harness.py")}  # lm-eval loads it by path, outside the package
DRAW = {"matplotlib", "plotly"}
MAY_DRAW = {
    ("scaling", "reports/plots.py"),
    ("scaling", "reports/depth_plot.py"),
    ("scaling", "reports/html.py"),
    ("training", "tune_plot.py"),
}
# folders of scaling, each of which may import those before it, and the modules beside them
ORDER = ["solver", "runs", "fits", "optima", "comparison", "planning", "reports"]
BESIDE = {"record", "text", "outputs"}
HEAVY = {"torch", "transformers", "accelerate", "datasets"}  # scaling runs without any of them


def imported(tree):
    """Absolute names with what is taken from them, and depths of relative imports, anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.module or "", node.level
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", 0) for alias in node.names)


def violations(source, folder, file):
    """Broken rules of one file, `file` being its path below the folder."""
    found = []
    for name, level in imported(ast.parse(source)):
        top = name.partition(".")[0]
        if level > len(Path(file).parts):
            found.append(f"relative import leaves {folder}: {name}")
        if level:
            continue
        if top == folder and (folder, file) not in OUTSIDE:
            found.append(f"absolute import inside {folder}: {name}")
        elif top in MAY_IMPORT.keys() - {folder} and not any(
            f"{name}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT[folder]
        ):
            found.append(f"{folder} imports {name}")
        if top in DRAW and (folder, file) not in MAY_DRAW:
            found.append(f"{name} outside the modules that draw")
        if folder == "scaling" and top in HEAVY:
            found.append(f"scaling imports {name}")
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_they_may(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    if not files:
        pytest.skip(f"{folder} has no modules yet")
    broken = {}
    for file in files:
        below = file.relative_to(ROOT / folder).as_posix()
        if found := violations(file.read_text(encoding="utf-8"), folder, below):
            broken[f"{folder}/{below}"] = found
    assert broken == {}


def test_the_folders_of_scaling_import_in_one_direction():
    for at, folder in enumerate(ORDER):
        for file in sorted((ROOT / "scaling" / folder).glob("*.py")):
            taken = {
                name.partition(".")[0]
                for name, level in imported(ast.parse(file.read_text(encoding="utf-8")))
                if level == 2
            }
            assert taken <= BESIDE | set(ORDER[:at]), f"{folder}/{file.name}"
    folders = {path.parent.name for path in (ROOT / "scaling").glob("*/__init__.py")}
    assert folders == set(ORDER)


@pytest.mark.parametrize(
    ("folder", "file", "source"),
    [
        ("hf_looped", "hub.py", "import training"),
        ("hf_looped", "hub.py", "from hf_looped.accounting import parameters"),
        ("hf_looped", "hub.py", "def f():\n    from scaling.runs import write_table"),
        ("scaling", "fit.py", "import torch.nn"),
        ("scaling", "fit.py", "from hf_looped import LoopedConfig"),
        ("scaling", "fit.py", "from matplotlib import pyplot"),
        ("scaling", "fit.py", "from ..training import grid"),
        ("training", "loop.py", "import scaling"),
        ("training", "loop.py", "from scaling import fit_joint"),
        ("training", "loop.py", "from scaling.runs_of_others import x"),
        ("training", "loop.py", "import evaluation.lm"),
        ("training", "plots.py", "import plotly.express"),
        ("model_cards", "card.py", "from training.record import read"),
    ],
)
def test_a_forbidden_import_is_found(folder, file, source):
    assert len(violations(source, folder, file)) == 1


@pytest.mark.parametrize(
    ("folder", "file", "source"),
    [
        ("hf_looped", "hub.py", "import torch\nfrom .accounting import parameters"),
        (
            "scaling",
            "reports/plots.py",
            "from matplotlib.figure import Figure\nfrom ..solver.laws import JointLaw",
        ),
        ("training", "sweep.py", "from scaling.runs import collect_runs\nimport hf_looped"),
        ("training", "sweep.py", "from scaling import runs\nfrom . import grid"),
        ("training", "data/text.py", "from .. import grid"),
        (
            "model_cards",
            "card.py",
            "from scaling import fit_joint\nfrom hf_looped import LoopedConfig",
        ),
    ],
)
def test_an_allowed_import_is_not_reported(folder, file, source):
    assert violations(source, folder, file) == []


@pytest.mark.slow
@pytest.mark.network
def test_the_wheel_holds_hf_looped_alone(tmp_path):
    """Top-level names like `scaling` and `evaluation` collide with other distributions in silence."""
    unneeded = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "runs", "demo"
    )
    shutil.copytree(ROOT, tmp_path / "source", ignore=unneeded)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, "."],
        cwd=tmp_path / "source",
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"hf_looped"}
    assert any("modeling_looped.py" in name for name in zipfile.ZipFile(wheel).namelist())


def test_no_tracked_text_file_names_a_path_of_a_developers_machine():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    path = r"(^|[^A-Za-z0-9_.-])/(work|root)" + "/"  # in two parts, so that this line is no match
    result = subprocess.run(
        ["git", "grep", "-nIE", path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stdout == ""
    assert result.returncode == 1, result.stderr  # 1: nothing found; above: git failed
