"""The corpus against package trees written by hand, whose docstrings are known."""

import hashlib
import json
import sys
from pathlib import Path

import datasets
import pytest

from training import corpus as corpus_module
from training.config import DataConfig
from training.corpus import docstrings, fingerprint_texts, load_corpus

LONG = " It says so at a length that no one-liner has, to count as a document of the corpus." * 2


def text(name):
    return f"{name}.{LONG}"


@pytest.fixture
def no_standard_library(monkeypatch):
    """The named packages alone; the standard library has a test of its own."""
    monkeypatch.setattr(corpus_module, "_standard_library_files", list)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Install packages from {path: source} on the path, with or without a list of files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def install(name, version, files, *, record=True, top_level=None, site="site"):
        folder = tmp_path / site
        for path, source in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(source if isinstance(source, bytes) else source.encode())
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if record:
            (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        if top_level:
            (info / "top_level.txt").write_text(top_level)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return install


def load_texts(**fields):
    return load_corpus(DataConfig(**fields)).documents["text"][:]


def test_docstrings_of_modules_classes_functions_and_nested_blocks_come_in_source_order():
    source = '''
"""module"""
async def one():
    """async"""
    def inner():
        """nested"""
class Two:
    """class"""
    if True:
        def three(self):
            """method in if"""
    else:
        def four(self): "method in else"
try:
    def five(): """in try"""
except ImportError:
    def five(): """in except"""
finally:
    def six(): """in finally"""
match 1:
    case 1:
        def seven(): """in match"""
x = """no docstring"""
def eight():
    f"""no docstring {x}"""
def nine():
    b"""no docstring"""
'''
    assert docstrings(source.encode()) == [
        "module",
        "async",
        "nested",
        "class",
        "method in if",
        "method in else",
        "in try",
        "in except",
        "in finally",
        "in match",
    ]


def test_indentation_is_removed_and_odd_sources_are_read_or_skipped_without_warning():
    """Warnings are errors in this suite: the invalid escape is read silently."""
    assert docstrings(b'def f():\n    """One.\n\n        Two.\n      Three.\n    """') == [
        "One.\n\n  Two.\nThree."
    ]
    assert docstrings(b'"""escape \\d"""') == ["escape \\d"]
    assert docstrings(b'# -*- coding: latin-1 -*-\n"""caf\xe9"""') == ["café"]
    assert docstrings(b"def broken(:") == []
    assert docstrings(b"\x00") == []
    assert docstrings(b'"""caf\xe9"""') == []


def test_packages_come_in_the_order_named_with_files_sorted_and_repeats_kept_once(
    environment, no_standard_library
):
    environment(
        "zoo-tools",
        "2.0",
        {
            "zoo/__init__.py": f'"""{text("zoo")}"""',
            "zoo/b.py": f'"""{text("b")}"""\ndef f(): """{text("repeated")}"""',
            "zoo/a/x.py": f'"""{text("a.x")}"""\nclass C: """{text("zoo")}"""',
            "zoo/a_first.py": f'"""{text("a_first")}"""',
            "single.py": f'"""{text("single")}"""',
            "zoo/short.py": '"""Too short for a document."""',
            "zoo/surrogate.py": f'"""{text("lone")} \\ud800"""',
        },
    )
    environment("ant", "1.0", {"ant.py": f'"""{text("ant")}"""\ndef f(): """{text("repeated")}"""'})
    expected = ["single", "zoo", "a.x", "a_first", "b", "repeated", "ant"]
    corpus = load_corpus(DataConfig(packages=["zoo-tools", "ant"]))
    assert corpus.documents["text"][:] == [text(name) for name in expected]
    assert corpus.sources["zoo-tools"] == "2.0" and corpus.sources["ant"] == "1.0"
    turned = load_texts(packages=["ant", "zoo-tools"])
    assert turned == [text(n) for n in ("ant", "repeated", "single", "zoo", "a.x", "a_first", "b")]


def test_tests_and_caches_are_left_out_so_that_the_way_of_installing_does_not_matter(
    environment, no_standard_library
):
    """Three ways: a file list as pip leaves it, a declared name without list, and neither."""
    kept = {"{}/__init__.py": f'"""{text("init")}"""', "{}/core/m.py": f'"""{text("m")}"""'}
    extra = {
        "{}/tests/test_m.py": f'"""{text("a test")}"""',
        "{}/core/test/data.py": f'"""{text("a fixture")}"""',
        "{}/__pycache__/m.py": f'"""{text("a cache")}"""',
    }

    def files(package, *parts):
        return {path.format(package): source for part in parts for path, source in part.items()}

    environment("by-record", "1", files("recorded", kept, extra))
    environment("declared", "1", files("other_name", kept), record=False, top_level="other_name\n")
    environment("plain-name", "1", files("plain_name", kept), record=False)
    texts = [load_texts(packages=[name]) for name in ("by-record", "declared", "plain-name")]
    assert texts == [[text("init"), text("m")]] * 3


def test_no_package_is_imported(environment, no_standard_library):
    """Importing it would raise; its docstring is read all the same."""
    environment(
        "explosive",
        "1",
        {"explosive/__init__.py": f'"""{text("boom")}"""\nraise SystemExit("boom")'},
    )
    assert load_texts(packages=["explosive"]) == [text("boom")]
    assert "explosive" not in sys.modules


def test_several_processes_read_the_same_documents_in_the_same_order(
    environment, no_standard_library, monkeypatch
):
    environment(
        "many",
        "1",
        {f"many/m{i:03d}.py": f'"""{text(f"module {i}")}"""' for i in range(100)},
    )
    alone = load_corpus(DataConfig(packages=["many"]))
    monkeypatch.setattr(corpus_module, "POOL_MIN_FILES", 1)
    together = load_corpus(DataConfig(packages=["many"]))
    assert together.documents["text"][:] == alone.documents["text"][:]
    assert together.fingerprint == alone.fingerprint


def test_the_standard_library_gives_its_own_documents_first():
    """The docstrings of running modules, cleaned by inspect, are the referee."""
    import argparse
    import inspect

    corpus = load_corpus(DataConfig(packages=[], max_documents=500))
    texts = corpus.documents["text"][:]
    assert len(texts) == len(set(texts)) == 500
    assert inspect.getdoc(argparse.ArgumentParser) in texts
    assert corpus.sources == {"python": ".".join(map(str, sys.version_info[:3]))}
    relative = [path.as_posix() for path in corpus_module._standard_library_files()]
    assert not [path for path in relative if "/test/" in path or "/site-packages/" in path]
    assert not [path for path in relative if "/idlelib/" in path or "/tkinter/" in path]


def test_the_fingerprint_is_the_sha256_of_lengths_and_texts_in_order(
    environment, no_standard_library
):
    environment("pair", "1", {"pair.py": f'"""{text("é")}"""\ndef f(): """{text("b")}"""'})
    digest = hashlib.sha256()
    for document in (text("é"), text("b")):
        raw = document.encode("utf-8")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    assert load_corpus(DataConfig(packages=["pair"])).fingerprint == digest.hexdigest()
    assert fingerprint_texts(["ab", "c"]) != fingerprint_texts(["a", "bc"])
    assert fingerprint_texts(["a", "b"]) != fingerprint_texts(["b", "a"])


def write_rows(folder, kind, rows):
    path = Path(folder) / f"rows.{kind}"
    if kind == "json":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


@pytest.fixture
def local(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_local_files_give_their_texts_and_rows_without_text_are_dropped_and_counted(local, kind):
    bars = datasets.is_progress_bar_enabled()
    rows = [{"body": body, "id": i} for i, body in enumerate(["one", "", None, " \n", "two"])]
    path = write_rows(local, kind, rows)
    corpus = load_corpus(
        DataConfig(corpus=kind, files=[path], text_column="body"), cache_dir=local / "own"
    )
    assert corpus.documents["text"][:] == ["one", "two"]
    assert corpus.documents.column_names == ["text"]
    assert corpus.dropped == 3
    assert corpus.fingerprint == fingerprint_texts(["one", "two"])
    assert corpus.sources == {path: f"{Path(path).stat().st_size} bytes"}
    assert datasets.is_progress_bar_enabled() == bars


def test_a_text_file_is_cut_into_documents_at_blank_lines_and_globs_are_sorted(local):
    (local / "b.txt").write_text("third\n")
    (local / "a.txt").write_text("first, line one\nline two\n\n\nsecond\n")
    corpus = load_corpus(DataConfig(corpus="text", files=[str(local / "*.txt")]))
    texts = [document.strip() for document in corpus.documents["text"]]
    assert texts == ["first, line one\nline two", "second", "third"]


def test_max_documents_keeps_the_first_ones(local, environment, no_standard_library):
    path = write_rows(local, "json", [{"text": body} for body in ["", "one", "two", "three"]])
    assert load_texts(corpus="json", files=[path], max_documents=2) == ["one", "two"]
    environment("duo", "1", {"duo.py": f'"""{text("1")}"""\ndef f(): """{text("2")}"""'})
    assert load_texts(packages=["duo"], max_documents=1) == [text("1")]


def refused(match, **fields):
    with pytest.raises(ValueError, match=match):
        load_corpus(DataConfig(**fields))


def test_a_package_that_is_not_installed_is_refused_with_a_remedy(environment):
    refused(
        r"data\.packages: 'no-such' is not installed; pip install no-such", packages=["no-such"]
    )
    environment("provider", "1", {"imported_name/__init__.py": ""}, top_level="imported_name\n")
    refused("installed as provider: name that", packages=["imported_name"])


def test_a_package_without_python_sources_is_refused(environment):
    environment("only-data", "1", {"only_data/table.csv": "1,2"})
    refused("'only-data' is installed but has no Python sources", packages=["only-data"])


def test_missing_files_are_refused_by_name(local):
    refused(r"data\.files: .*'json' reads local files and none is given", corpus="json")
    refused(
        r"data\.files: .*nothing-\*\.txt' matches no file", corpus="text", files=["nothing-*.txt"]
    )
    refused(r"set data\.corpus to one of parquet, json, text", files=["some.txt"])


def test_a_missing_or_wrong_text_column_is_refused_naming_those_there_are(local):
    path = write_rows(local, "parquet", [{"body": "one", "id": 1}])
    refused(r"has no column 'text'; it has body, id", corpus="parquet", files=[path])
    refused(
        r"column 'id' .* holds int64, not text", corpus="parquet", files=[path], text_column="id"
    )


def test_an_empty_corpus_is_refused(local, environment, no_standard_library):
    path = write_rows(local, "json", [{"text": ""}, {"text": " "}])
    refused(r"'json' holds no documents \(2 rows held no text\)", corpus="json", files=[path])
    environment("terse", "1", {"terse.py": '"""Short."""'})
    refused(r"data\.corpus: 'docstrings' holds no documents", packages=["terse"])


def test_unreadable_files_and_unknown_splits_are_refused(local):
    (local / "bad.parquet").write_text("no parquet")
    refused("'parquet' .*cannot be loaded", corpus="parquet", files=[str(local / "bad.parquet")])
    path = write_rows(local, "json", [{"text": "one"}])
    refused("dataset_split = 'dev'", corpus="json", files=[path], dataset_split="dev")


def test_a_hub_name_is_passed_on_with_its_config_and_split(monkeypatch):
    """No network: `load_dataset` is replaced and says what it was asked for."""
    asked = {}

    def fake(path, name=None, **options):
        asked.update(path=path, name=name, **options)
        return datasets.Dataset.from_dict({"text": ["one", "two"]})

    monkeypatch.setattr(datasets, "load_dataset", fake)
    texts = load_texts(corpus="owner/name", dataset_config="small", dataset_split="validation")
    assert texts == ["one", "two"]
    assert (asked["path"], asked["name"], asked["split"]) == ("owner/name", "small", "validation")
