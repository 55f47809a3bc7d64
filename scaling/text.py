"""Words, numbers and Markdown tables of the text reports."""

import textwrap
from collections.abc import Sequence

WIDTH = 110
NONE = "–"


def wrap(text: str, indent: str = "") -> str:
    """Break a paragraph at `WIDTH`; lines after the first are indented."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def bullets(sentences: Sequence[str]) -> str:
    """List sentences, one bullet each."""
    return "\n".join(wrap(f"- {text}", indent="  ") for text in sentences)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table with aligned columns."""
    widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in (header, *rows)
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def criterion(delta: float) -> str:
    """Say what a fit minimises: Huber of that threshold, or its limit."""
    kind = f"Huber({delta:g})" if delta > 0 else "least absolute deviations"
    return f"{kind} on log loss"


def unit_of(loss_unit: str) -> str:
    """Say what the losses are given in, and what they were converted from.

    >>> unit_of("nats"), unit_of("bits")
    ('nats per token', 'nats per token (converted from bits)')
    """
    return "nats per token" + (f" (converted from {loss_unit})" if loss_unit != "nats" else "")


def count(value: float) -> str:
    """Shorten a parameter or token count to four digits, e.g. "67.77 M".

    >>> count(67_774_229.4), count(1_234.0)
    ('67.77 M', '1.234 k')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"
