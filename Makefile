# The two commands of a newcomer, and what the checks run. Everything is made below this folder.

PYTHON ?= python3
VENV := .venv
PROGRAM := $(VENV)/.program
CHECKS := $(VENV)/.checks
ALL_VERBS := hub,search
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TMPDIR := $(CURDIR)/.tmp
unexport PYTHONDONTWRITEBYTECODE  # without what Python compiled, every process of the tests compiles all of it anew
$(shell mkdir -p .tmp)

.PHONY: demo test test-long lint setup clean
.NOTPARALLEL:  # both install into one folder

demo: $(PROGRAM)
	rm -rf runs/demo
	$(VENV)/bin/caddie run tiny --out runs/demo

PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(CHECKS)
	$(PYTEST)

test-long: $(CHECKS)
	$(PYTEST) -m "long and not slow"

lint: $(CHECKS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

setup: $(CHECKS)

# pip itself comes first: that of Python 3.11 takes a fifth longer. It compiles nothing: of 8,700 files that takes as long
# as all else, and Python compiles the third of them that is ever imported by itself, once.
define install
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(VENV)/bin/python -m pip install -qq --no-compile -c constraints.txt -e '.[$(1)]'
endef

$(PROGRAM): pyproject.toml constraints.txt
	$(call install,$(ALL_VERBS))
	touch $@

$(CHECKS): pyproject.toml constraints.txt
	$(call install,dev)
	touch $(PROGRAM) $@

clean:
	rm -rf $(VENV) .tmp build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
