"""What scaling/README.md tells a reader to type is understood, and its Python example runs."""

import re
import shlex
from pathlib import Path

import pytest

from scaling.__main__ import _parser
from scaling.runs import write_table
from scaling.runs.numbers import RULES

README = (Path(__file__).parents[2] / "scaling" / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "scaling"]
    assert callable(_parser().parse_args(words[3:]).run)


def test_every_command_of_the_program_is_there():
    names = {shlex.split(command)[3] for command in COMMANDS} | {"check"}
    usage = _parser().format_help()
    assert names == set(re.findall(r"^ {4}([a-z]+)(?: |$)", usage, flags=re.MULTILINE))
    assert "python -m scaling check" in README


def test_every_column_that_is_checked_is_in_the_table():
    table = README[README.index("| column |") : README.index("`python -m scaling check")]
    assert [name for name in RULES if f"`{name}`" not in table] == []


def test_the_python_example_runs(paper, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_table(paper, "runs.csv")
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})  # the example is our own text
    assert "0.458" in capsys.readouterr().out
