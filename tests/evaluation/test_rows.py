"""From sources to rows: prompts of every dataset, generated tasks, counts, and what bad files get."""

import json

import pytest

from evaluation.command import main
from evaluation.prepare import prepare, read_sources
from evaluation.rows import load_rows
from evaluation.sources import rows_from_hub
from evaluation.suite import TASKS
from evaluation.synthetic import SHA256, fingerprint, generated

COQA = {
    "story": "A cat sat.",
    "questions": ["Who sat?", "Where?", "Why?"],
    "answers": {"input_text": ["a cat", "", "tired"]},
}
HEAD = (
    "Below is a story followed by a series of related questions. Please answer the final question "
    "by referring to the story and the previous questions.\n\nStory: A cat sat.\n\n"
)
SQUAD = {"context": "A fox.", "question": "Who?", "answers": {"text": ["fox", "a fox"]}}


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("triviaqa", {"question": "Q?", "answer": {"value": "A"}}, [("Question: Q?\nAnswer:", "A")]),
        ("triviaqa", {"question": "Q?", "answer": {"value": ""}}, []),
        ("nq", {"question": "q", "answer": ["a", "b"]}, [("Question: q\nAnswer:", "a")]),
        ("webq", {"question": "q", "answers": ["a", "b"]}, [("Question: q\nAnswer:", "a")]),
        ("lambada_openai", {"text": "He said a word"}, [("He said a", "word")]),
        ("tydiqa_goldp", {"id": "english-1", **SQUAD},
         [("Context: A fox.\nQuestion: Who?\nAnswer:", "fox")]),
        ("tydiqa_goldp", {"id": "korean-1", **SQUAD}, []),
        ("squadv2", SQUAD,
         [("Context: A fox.\nQuestion: Who?\nAnswer:", "fox")]),
        ("squadv2", SQUAD | {"answers": {"text": []}}, []),
        ("drop", {"passage": "P.", "question": "q", "answers_spans": {"spans": ["7", "8"]}},
         [("Context: P.\nQuestion: q\nAnswer:", "7")]),
        ("svamp", {"Body": "Tom has 3 pens. ", "Question": "How many?", "Answer": "3.0"},
         [("Question: Tom has 3 pens. How many?\nAnswer:", "3")]),
        ("svamp", {"Body": "A pie", "Question": "How much?", "Answer": 0.25},
         [("Question: A pie. How much?\nAnswer:", "0.25")]),
        ("asdiv", {"body": "Two hens.", "question": "Eggs?", "answer": "9 (eggs)"},
         [("Question: Two hens Eggs?\nAnswer:", "9")]),
        ("mawps", {"Question": "N_00 and N_01 ?", "Numbers": "7.0 2.5", "Answer": 9.5},
         [("Question: 7 and 2.5 ?\nAnswer:", "9.5")]),
        ("mawps", {"Question": "N_00 and N_02 ?", "Numbers": "7.0 2.5", "Answer": 9.0}, []),
        ("coqa", COQA, [
            (HEAD + "Final question:\nQuestion: Who sat?\nAnswer:", "a cat"),
            (HEAD + "Preceding questions:\nQuestion: Who sat?\nAnswer: a cat\nQuestion: Where?\nAnswer: \n\n"
             "Final question:\nQuestion: Why?\nAnswer:", "tired"),
        ]),
    ],
)  # fmt: skip
def test_prompts_of_a_datasets_rows(task, row, expected):
    found = rows_from_hub(task, [row])
    assert [(one["context"], one["continuation"]) for one in found] == expected


def test_a_multiple_choice_row():
    row = {"question": "Q?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}
    assert rows_from_hub("arc_easy", [row]) == [
        {"query": "Question: Q?", "choices": ["x", "y"], "gold": 1}
    ]


def test_generated_rows_have_the_published_fingerprints():
    rows = generated()
    assert {name: fingerprint(made) for name, made in rows.items()} == SHA256
    for name, made in rows.items():
        assert len(made) == 1000 == TASKS[name].rows


def test_generated_answers_follow_from_their_prompts():
    """Solved by reading the lines, not by the generator's own tables."""
    for name, made in generated().items():
        for row in made[:100]:
            mark = " -> " if name == "induction_head" else "="
            lines = [line for line in row["context"].split("\n") if mark in line]
            values = dict([part.strip() for part in line.split(mark)] for line in lines)
            if name == "induction_head":
                query = row["context"].split("\n")[-1].removesuffix(" ->")
                assert row["choices"][row["gold"]] == row["continuation"]
            else:
                query = row["context"].split("value of ")[-1][0]
            answer = values[query]
            assert values.get(answer, answer) == row["continuation"]


def test_rows_are_shuffled_once_numbered_and_capped(tools, tmp_path, monkeypatch):
    rows = tools.make_rows("svamp", 30)
    tools.write_rows(tmp_path, "svamp", rows)
    first, again = load_rows(tmp_path, "svamp"), load_rows(tmp_path, "svamp")
    assert first == again
    assert [row["index"] for row in first] == list(range(30))
    texts = [row["context"] for row in rows]
    assert [row["context"] for row in first] != texts
    assert sorted(row["context"] for row in first) == sorted(texts)
    monkeypatch.setattr("evaluation.rows.MOST_ROWS", 10)
    assert load_rows(tmp_path, "svamp") == first[:10]


def test_exactly_one_space_stands_before_an_answer(tmp_path, tools):
    row = {"context": "Say it: \n", "continuation": "  so"}
    tools.write_rows(tmp_path, "lambada_openai", [row])
    (found,) = load_rows(tmp_path, "lambada_openai")
    assert (found["prompt"], found["target"]) == ("Say it:", " so")


def test_preparing_checks_counts_and_records_where_rows_are_from(tools, tmp_path, capsys):
    source, out = tmp_path / "with space ü", tmp_path / "out"
    source.mkdir()
    tools.write_rows(source, "svamp", tools.make_rows("svamp", 20))
    options = ["--out", str(out), "--tasks", "looped_svamp", "--from", str(source)]
    assert main(["prepare", *options]) == 2
    assert "20 rows from svamp.jsonl, but the suite has 300. --partial" in capsys.readouterr().err
    assert main(["prepare", *options, "--partial"]) == 0
    assert "20 of 300 rows from svamp.jsonl, licence MIT" in capsys.readouterr().out
    told = read_sources(out)["svamp"]
    assert told["partial"] and told["rows"] == 20 and len(told["sha256"]) == 16
    prepare(out, ["induction_head"])
    assert set(read_sources(out)) == {"svamp", "induction_head"}
    tools.write_rows(source, "svamp", tools.make_rows("svamp", 301))
    with pytest.raises(ValueError, match="301 rows .* but the suite has 300. Another version"):
        prepare(out, ["svamp"], source=source, partial=True)
    tools.write_rows(source, "svamp", tools.make_rows("svamp", 5))
    with pytest.raises(ValueError, match="5 rows .* 5 shots are drawn"):
        prepare(out, ["svamp"], source=source, partial=True)


def test_core_bundle_tasks_name_the_file_they_need(tmp_path):
    with pytest.raises(
        ValueError, match=r"bigbench_dyck_languages\.jsonl of the CORE bundle.*--from DIR"
    ):
        prepare(tmp_path, ["bigbench_dyck_languages"])


def test_without_a_network_the_dataset_and_the_way_out_are_named(tmp_path, monkeypatch):
    import datasets

    def fails(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(ValueError, match="ChilleD/SVAMP could not be loaded.*no route.*--from DIR"):
        prepare(tmp_path, ["svamp"])


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("svamp", '{"context": "a"}', "line 2: continuation is missing"),
        ("svamp", '{"context": "a", "continuation": "  "}', "line 2: continuation is empty"),
        ("svamp", '{"context": 3, "continuation": "a"}', "line 2: context is 3"),
        ("svamp", "[1]", "line 2: list, not an object"),
        ("svamp", '{"context"', "line 2: not JSON"),
        ("arc_easy", '{"choices": ["a", "b"], "gold": 0}', "query is missing"),
        ("arc_easy", '{"query": "q", "choices": ["a", "b"], "gold": 2}', "gold is 2, but must"),
        ("arc_easy", '{"query": "q", "choices": ["a", ""], "gold": 0}', r"choices\[1\] is empty"),
        ("arc_easy", '{"query": "q", "choices": "ab", "gold": 0}', "choices is 'ab'"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tools, tmp_path, task, row, message):
    good = json.dumps(tools.make_rows(task, 1)[0])
    path = tmp_path / f"{task}.jsonl"
    path.write_text(f"{good}\n{row}\n")
    with pytest.raises(
        ValueError, match=rf"{task}\.jsonl, {message}" if message.startswith("line") else message
    ):
        load_rows(tmp_path, task)


def test_more_shots_than_rows_are_refused(tools, tmp_path):
    tools.write_rows(tmp_path, "svamp", tools.make_rows("svamp", 5))
    with pytest.raises(ValueError, match="5 rows, but the task takes 5 others as shots"):
        load_rows(tmp_path, "svamp")
