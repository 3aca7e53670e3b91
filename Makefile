# The two commands of a newcomer, and what the checks run. Everything is made below this folder.

PYTHON ?= python3
VENV := .venv
PROGRAM := $(VENV)/.program
TESTS := $(VENV)/.tests
CHECKS := $(VENV)/.checks
DOCS := $(VENV)/.docs
ALL_VERBS := hub,search
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TMPDIR := $(CURDIR)/.tmp
unexport PYTHONDONTWRITEBYTECODE  # without what Python compiled, every process of the tests compiles all of it anew
$(shell mkdir -p .tmp)

.PHONY: demo test test-long mutation fuzz faults lint docs setup clean
.NOTPARALLEL:  # all install into one folder

demo: $(PROGRAM)
	@if [ -f runs/demo/result.json ]; then rm -rf runs/demo; fi  # one that was stopped goes on
	$(VENV)/bin/caddie run tiny 'score.tilt=NGramTilt(order=6, boost=3.5)' --out runs/demo
	@printf 'page    ' && $(VENV)/bin/caddie export runs/demo --to html

PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest --dist loadfile --no-loadscope-reorder

test: $(TESTS)
	$(PYTEST) -n logical --maxprocesses 4

test-long: $(CHECKS)
	$(PYTEST) -n 2 -m "long and not slow" --cov --cov-report=
	@echo "coverage by the long tests, least first; what they start in other processes is not counted"
	@$(VENV)/bin/python -m coverage report | sed -n '1,17p; /^TOTAL/p'

mutation: $(CHECKS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python bench/mutation.py --mutants $(or $(N),300) --seed $(or $(SEED),0)

fuzz: $(TESTS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/fuzz/fuzz.py --cases $(or $(N),2000) --seed $(or $(SEED),0)

# Kills at N random moments, and every fault of docs/reliability.md; of a run every write is refused once where N >= 100.
faults: $(CHECKS)
	$(PYTEST) -n 2 -m long tests/faults --kills $(or $(N),100)

lint: $(CHECKS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo build/site/index.html

setup: $(CHECKS)
	@echo "caddie is installed: $(VENV)/bin/caddie --help, or make demo"

# pip compiles nothing: of 8,700 files that takes as long as all else, and Python compiles the third of them that is ever
# imported by itself, once.
PIP_INSTALL := install -qq --no-compile -c constraints.txt
PIP := $(VENV)/bin/python -m pip $(PIP_INSTALL)

# The pip of the constraints, which is a fifth quicker than that of Python 3.11, is installed by the interpreter's own or,
# where it has none, left to venv. PyTorch goes first, by one process, and what else there is beside it by another: one after
# the other would take twice as long. What fails there is tried again, and told, by the last lines, which install all that is
# missing (without setuptools of their own, which are downloaded anew, if those that are there will do); what is there already
# is imported meanwhile, on the other core, so that the first run finds it compiled. What only `make test-long` and `make
# lint` need is left to them: Triton is as large as all but PyTorch together.
BESIDE := numpy scipy sympy networkx fsspec setuptools brotli click constriction filelock jinja2 nvidia-ml-py psutil \
	python-minifier rich \
	safetensors sentencepiece zstandard huggingface_hub optuna

define install
	@echo "installing caddie and PyTorch into $(VENV), about a minute"
	@(while sleep 2 && kill -0 $$$$; do printf .; done 2>/dev/null) & trap "kill $$! 2>/dev/null; echo" EXIT; \
		$(PYTHON) -m venv --without-pip $(VENV) || exit; \
		PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m pip --python $(VENV)/bin/python $(PIP_INSTALL) pip 2>.tmp/pip \
			|| $(PYTHON) -m venv $(VENV) || exit; \
		printf '%s\n' '--no-deps torch' '$(strip $(BESIDE) $(2))' | xargs -P 2 -L 1 $(PIP) 2>.tmp/pip; \
		$(VENV)/bin/python -c 'import torch, scipy.special' 2>/dev/null & imports=$$!; \
		$(PIP) --no-build-isolation -e '.[$(1)]' 2>.tmp/pip || { echo; $(PIP) -e '.[$(1)]'; }; \
		status=$$?; kill $$imports 2>/dev/null; exit $$status
endef

$(PROGRAM): pyproject.toml constraints.txt
	$(call install,$(ALL_VERBS))
	@touch $@

$(TESTS): pyproject.toml constraints.txt
	$(call install,test,tokenizers tiktoken hypothesis pytest-xdist)
	@touch $(PROGRAM) $@

$(CHECKS): pyproject.toml constraints.txt
	$(call install,dev,tokenizers tiktoken pyarrow hypothesis pytest-xdist pytest-cov mypy triton ruff)
	@touch $(PROGRAM) $(TESTS) $@

$(DOCS): $(PROGRAM)
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .tmp build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
