"""Reasoning primitives, generated: variable assignment and the induction head.

Rows are a function of fixed seeds; `SHA256` says which. Prompts: Saunshi et al. 2024 (arXiv:2409.19044),
appendix B; the variables' values and numbers: Schwethelm et al. 2026 (arXiv:2604.21106), appendix.
"""

import hashlib
import json
import random
import string
from collections.abc import Mapping
from functools import cache
from typing import Any

Row = dict[str, Any]

VARIABLE_ASSIGNMENT = (
    "var_assign_d0_math",
    "var_assign_d0_code",
    "var_assign_d1_math",
    "var_assign_d1_code",
)
INDUCTION_HEAD = "induction_head"
N_ROWS = 1_000
SHA256 = {  # first 16 hex digits
    "var_assign_d0_math": "cdf6829107575b3e",
    "var_assign_d0_code": "11bd9dcff177e371",
    "var_assign_d1_math": "db9470e4cca51246",
    "var_assign_d1_code": "b7d0228ac1879793",
    "induction_head": "5bac985394abdfc6",
}

_MATH = "The following is a set of simple mathematical equations."
_CODE = (
    "The following is a very short Python program. Use the program to resolve the value of the "
    "variable in the question."
)


@cache
def generated() -> dict[str, list[Row]]:
    """Generate the rows of all five tasks, context and continuation (and choices, gold)."""
    generator = random.Random(42)  # one for the four sets, in this order
    rows = {
        name: [_assignment(generator, name) for _ in range(N_ROWS)] for name in VARIABLE_ASSIGNMENT
    }
    generator = random.Random(1337)
    rows[INDUCTION_HEAD] = [_induction(generator) for _ in range(N_ROWS)]
    return rows


def fingerprint(rows: list[Row]) -> str:
    """First 16 hex digits of the SHA-256 of rows as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def _assignment(generator: random.Random, name: str) -> Row:
    """Five variables; at depth 1 five aliases, one to one, one of which is asked for."""
    deep, code = "_d1_" in name, name.endswith("_code")
    letters = generator.sample(string.ascii_lowercase, 10 if deep else 5)
    values = {letter: str(generator.randint(1, 25)) for letter in letters[:5]}
    aliases: Mapping[str, str] = {}
    if deep:
        bases = letters[:5]
        generator.shuffle(bases)
        aliases = dict(zip(letters[5:], bases, strict=True))
    query = generator.choice(letters[5:] if deep else letters)
    answer = values[aliases.get(query, query)]
    between = " = " if code else "="
    lines = "\n".join(
        f"{left}{between}{right}" for left, right in (*values.items(), *aliases.items())
    )
    if code:
        context = f"{_CODE}\nProgram:\n{lines}\n\nQuestion:\nWhat is the value of {query}?\nAnswer:"
    else:
        context = f"{_MATH}\n\n{lines}\nWhat is the numerical value of {query}?\nAnswer:"
    return {"context": context, "continuation": answer}


def _induction(generator: random.Random) -> Row:
    """Eight lines "key -> value", then one of the keys again."""
    keys = ["".join(generator.choices(string.ascii_lowercase, k=4)) for _ in range(8)]
    values = ["".join(generator.choices(string.ascii_lowercase, k=3)) for _ in range(8)]
    gold = generator.randrange(8)
    lines = "\n".join(f"{key} -> {value}" for key, value in zip(keys, values, strict=True))
    return {
        "context": f"{lines}\n{keys[gold]} ->",
        "continuation": values[gold],
        "choices": values,
        "gold": gold,
    }
