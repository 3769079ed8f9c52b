# MAGIS: commands for people. `make help` lists them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
DEMO := --batch 8 --seq 256 --max-slowdown 1.10

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check format bench wheel clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## a virtual environment in .venv with everything installed

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[zoo,dev]"
	touch $(STAMP)

demo: setup ## plan BERT with dropout within 10 % of eager's time; run it beside eager and rivals, prove it, on this CPU
	$(BIN)/magis plan hf-bert-dropout $(DEMO) --output demo.plan.json
	$(BIN)/magis run demo.plan.json --beside checkpoint --beside micro:4 --pairs 3
	$(BIN)/magis why demo.plan.json --top 8

test: setup ## the tests, at most ten minutes
	$(BIN)/python -m pytest -n auto -m "not slow and not cuda"

test-all: setup ## every test, oracles and long checks included, at most an hour
	$(BIN)/python -m pytest -n auto -m "not cuda"

check: setup ## format, lint, types, import layers
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## format the code
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

bench: setup ## benchmarks of the hot paths
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

wheel: setup ## build the wheel
	$(BIN)/python -m build --wheel

clean: ## remove what was built
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
