PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
TEST_STAMP = $(VENV)/.installed-test
# one thread a process: two processes beat one on two threads here, and spinning threads starve a busy neighbour
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

.PHONY: install quickstart demo test check format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  train, distil and deploy on a virtual robot; writes runs/quickstart/report.html"
	@echo "make demo        evaluate, deploy and report the shipped artefacts (minutes)"
	@echo "make test        run the tests       make check   format, lint, types"
	@echo "make bench       long measurements   make install the environment only"

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(TEST_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@

install: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/distillery pipeline run=runs/quickstart

demo: $(STAMP)
	$(BIN)/distillery pipeline chain=demo run=runs/demo episodes=20 sentences=10 realtime=2

test: $(TEST_STAMP)
	$(BIN)/python -m pytest tests

check: $(TEST_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(TEST_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet -e '.[benchmark]'
	$(BIN)/python -m pytest tests -m slow
	$(BIN)/python tests/benchmarks/sim_speed.py
	$(BIN)/distillery benchmark

clean:
	rm -rf runs dist build *.egg-info
