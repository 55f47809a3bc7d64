"""What the commands say stays one line: users copy paths and grep logs."""

import io

import pytest
from rich.console import Console

from training.messages import say


@pytest.mark.parametrize(
    "sentence", ["/a/long/folder/log.jsonl lacks 3 entries", "runs[r=1]/[bold]x"]
)
def test_a_narrow_console_changes_nothing(sentence):
    output = io.StringIO()
    say(Console(file=output, width=10), sentence, style="red")
    assert output.getvalue() == sentence + "\n"
