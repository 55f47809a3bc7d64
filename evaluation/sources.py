"""Rows of a dataset on the Hub → prompts and answers, task by task.

An LM task's row becomes context and continuation, a multiple-choice one query, choices and gold; the
first answer is the gold one. Rows without an answer are skipped, as the suite does.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Row = dict[str, Any]

_COQA = (
    "Below is a story followed by a series of related questions. Please answer the final question "
    "by referring to the story and the previous questions."
)


def rows_from_hub(task: str, rows: Iterable[Row]) -> list[Row]:
    """Convert the rows of the task's split, in their order."""
    return [made for row in rows for made in _CONVERT[task](row)]


def _question(question: str, context: str | None = None) -> str:
    before = "" if context is None else f"Context: {context}\n"
    return f"{before}Question: {question}\nAnswer:"


def _pair(context: str, continuation: str) -> Iterator[Row]:
    if continuation.strip():
        yield {"context": context, "continuation": continuation}


def _number(value: Any) -> str:
    """Write a number as an integer where it is one."""
    number = float(value)
    return str(int(number)) if number.is_integer() else f"{number:.10g}"


def _without_stop(text: str) -> str:
    text = text.strip()
    return text[:-1].rstrip() if text.endswith(".") else text


def _triviaqa(row: Row) -> Iterator[Row]:
    yield from _pair(_question(row["question"]), row["answer"]["value"])


def _nq(row: Row) -> Iterator[Row]:
    yield from _pair(_question(row["question"]), row["answer"][0])


def _webq(row: Row) -> Iterator[Row]:
    yield from _pair(_question(row["question"]), row["answers"][0])


def _arc_easy(row: Row) -> Iterator[Row]:
    yield {
        "query": f"Question: {row['question']}",
        "choices": list(row["choices"]["text"]),
        "gold": list(row["choices"]["label"]).index(row["answerKey"]),
    }


def _lambada(row: Row) -> Iterator[Row]:
    context, _, last = row["text"].strip().rpartition(" ")
    yield from _pair(context, last)


def _tydiqa(row: Row) -> Iterator[Row]:
    if row["id"].startswith("english-"):
        yield from _squad(row)


def _squad(row: Row) -> Iterator[Row]:
    if row["answers"]["text"]:
        yield from _pair(_question(row["question"], row["context"]), row["answers"]["text"][0])


def _drop(row: Row) -> Iterator[Row]:
    if row["answers_spans"]["spans"]:
        context = _question(row["question"], row["passage"])
        yield from _pair(context, row["answers_spans"]["spans"][0])


def _coqa(row: Row) -> Iterator[Row]:
    """One row a turn: the story, the turns before, the question."""
    answers = row["answers"]["input_text"]
    turns = [
        f"{_question(question)} {answer}"
        for question, answer in zip(row["questions"], answers, strict=True)
    ]
    for number, (question, answer) in enumerate(zip(row["questions"], answers, strict=True)):
        before = "Preceding questions:\n" + "\n".join(turns[:number]) if number else None
        parts = [_COQA, f"Story: {row['story']}", before, f"Final question:\n{_question(question)}"]
        yield from _pair("\n\n".join(part for part in parts if part), answer)


def _svamp(row: Row) -> Iterator[Row]:
    question = f"{_without_stop(row['Body'])}. {row['Question']}"
    yield from _pair(_question(question), _number(row["Answer"]))


def _asdiv(row: Row) -> Iterator[Row]:
    answer = re.sub(r"\s*\(.*\)\s*$", "", row["answer"])
    yield from _pair(_question(f"{_without_stop(row['body'])} {row['question']}"), answer)


def _mawps(row: Row) -> Iterator[Row]:
    """Fill in N_00, N_01, …; a row that keeps a gap is dropped."""
    text = row["Question"]
    for place, number in enumerate(row["Numbers"].split()):
        text = text.replace(f"N_{place:02d}", _number(number))
    if not re.search(r"N_\d\d", text):
        yield from _pair(_question(text), _number(row["Answer"]))


_CONVERT: dict[str, Callable[[Row], Iterator[Row]]] = {
    "triviaqa": _triviaqa,
    "nq": _nq,
    "webq": _webq,
    "arc_easy": _arc_easy,
    "lambada_openai": _lambada,
    "tydiqa_goldp": _tydiqa,
    "squadv2": _squad,
    "drop": _drop,
    "coqa": _coqa,
    "svamp": _svamp,
    "asdiv": _asdiv,
    "mawps": _mawps,
}
