"""Sentences on the console."""

from rich.console import Console


def say(console: Console, sentence: str, style: str | None = None) -> None:
    """Print a sentence as it is: no markup, and no line breaks inside the paths and names that users copy and grep."""
    console.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)
