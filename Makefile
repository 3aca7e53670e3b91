# The two commands of a newcomer, and what the checks run. Everything is made below this folder.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TMPDIR := $(CURDIR)/.tmp
unexport PYTHONDONTWRITEBYTECODE  # without what Python compiled, every process of the tests compiles all of it anew
$(shell mkdir -p .tmp)

.PHONY: demo test lint setup clean

demo: $(STAMP)
	rm -rf runs/demo
	$(VENV)/bin/caddie run tiny --out runs/demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip  # that of Python 3.11 takes 17 s longer
	$(VENV)/bin/python -m pip install -qq -c constraints.txt -e '.[dev]'
	$(VENV)/bin/python -m compileall -q caddie  # as pip does with what it installs, but not with what it links
	touch $@

clean:
	rm -rf $(VENV) .tmp build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
