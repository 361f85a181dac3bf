# `make quickstart` and `make test` each set up everything they need, in .venv, and run: the first one installs the
# package alone, the second one adds the extras and what tests, benchmarks and documentation need. They need Python 3.11
# or newer and a network connection for the first installation; another interpreter is `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
COMPLETE := $(VENV)/.complete
# Python compiles what is imported, once: to compile every module of every package takes longer than the quick start.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip install --no-compile -c constraints.txt
RUNS := runs/quickstart

.PHONY: help install develop quickstart lint test docs bench gpu rehearse mutants clean

help:
	@echo "make quickstart  train a small network privately on scikit-learn's digits and write its privacy statement"
	@echo "make test        run the linters and the tests"
	@echo "                 without those of the documentation and the benchmarks: $(BIN)/pytest -m 'not docs and not benchmarks'"
	@echo "make lint        run the linters alone"
	@echo "make docs        build the documentation as a site: runs/site/index.html"
	@echo "make bench       time one training step against the ordinary one and Opacus, by model (an hour or more on a CPU)"
	@echo "make gpu         on a machine with a GPU: its tests and all figures, to docs/performance_gpu.md, in ten minutes; the"
	@echo "                 next visit goes on. With DATA=cifar10.npz also a row of the paper (benchmarks/cifar_npz.py)"
	@echo "make rehearse    the same with small parts on the CPU"
	@echo "make mutants     apply faults that would break a promise, and see that the tests notice (before a release)"
	@echo "make clean       remove $(VENV)"

install: $(INSTALLED)

develop: $(COMPLETE)

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { \
		echo "There is no '$(PYTHON)' here. Install Python 3.11 or newer, or name it: make PYTHON=/path/to/python"; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "'$(PYTHON)' is `$(PYTHON) --version`; Python 3.11 or newer is needed."; \
		echo "Name another one: make PYTHON=python3.12"; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $(INSTALLED)

$(COMPLETE): $(INSTALLED)
	$(INSTALL) -e '.[dev,docs,pld,finetune,dicom,export,report,slurm,ray]'
	@touch $(COMPLETE)

quickstart: $(INSTALLED)
	$(BIN)/dpl fit --config configs/digits.yaml --trainer.default_root_dir $(RUNS)
	@echo
	@echo "The privacy statement: `ls -td $(RUNS)/lightning_logs/version_* | head -n 1`/privacy_statement.md"
	@echo "The accuracy:          `ls -td $(RUNS)/lightning_logs/version_* | head -n 1`/result.json"

lint: $(COMPLETE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

docs: $(COMPLETE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(COMPLETE)
	$(BIN)/python benchmarks/step.py --json runs/bench.json

# Where the packages are there already and nothing can be downloaded: python benchmarks/gpu.py
gpu: $(COMPLETE)
	$(BIN)/python benchmarks/gpu.py $(if $(DATA),--data $(DATA))

rehearse: $(COMPLETE)
	$(BIN)/python benchmarks/gpu.py --rehearse

mutants: $(COMPLETE)
	$(BIN)/python tools/mutants.py

clean:
	rm -rf $(VENV)
