# make demo: train a small grid here and print φ. make test: the tests. Both make .venv first.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed
DEMO ?= demo

.PHONY: venv demo test test-slow lint
venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; try make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,eval,scaling,dev]'
	touch $@

demo: venv
	$(PY) -m training.sweep --grid demo --out $(DEMO)
	$(PY) -m evaluation prepare --out $(DEMO)/tasks --tasks looped_var_assign
	$(PY) -m evaluation --runs $(DEMO) --data $(DEMO)/tasks --tasks looped_var_assign --limit 100
	$(PY) -m scaling fit $(DEMO)/runs.csv --loss loss/looped_var_assign --report $(DEMO)/var_assign.txt
	$(PY) -m scaling fit $(DEMO)/runs.csv --json $(DEMO)/fit.json --report $(DEMO)/report.txt --plots $(DEMO)

# Two processes of one thread: the models are too small for more, and idle threads would wait in loops.
test: venv
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses 2 --dist loadfile

# torchao is for these tests alone: Transformers imports it with a warning wherever it is installed.
test-slow: venv
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[quantization]'
	OMP_NUM_THREADS=1 $(PY) -m pytest -m 'slow or network'

lint: venv
	$(PY) -m ruff check .
	$(PY) -m mypy
