# Paths here are relative, because make cannot carry a folder whose name has a space.
# What takes more than a line is in .ci/ and tests/servers/.
.DEFAULT_GOAL := help
.PHONY: help install demo test check format test-matrix ledger faults bench constraints clean

# By default the newest supported interpreter on PATH; another one: make install PYTHON=python3.12
PYTHON ?=
SCENARIO ?= confirms
ARGS ?=
BIN := .venv/bin

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

install: ## Make .venv with everything for development
	@.ci/venv .venv constraints.txt "$(PYTHON)"

demo: install ## Show the outbox at work, without any server
	@$(BIN)/outbox-relay demo

test: install ## Run every test; installs PostgreSQL and RabbitMQ where missing (ARGS="-k name")
	@tests/servers/install.sh
	@$(BIN)/python -m pytest $(ARGS)

check: install ## Lint, check the format, the types and the direction of imports
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: install ## Format the code and repair what the linter can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

test-matrix: ## Run the tests on the oldest and newest Python found, with SQLAlchemy 2.0 and 2.1
	@tests/servers/install.sh
	@.ci/matrix $(ARGS)

ledger: install ## Kill every part at random and account for every message (ARGS=--help)
	@tests/servers/install.sh
	@$(BIN)/python -m tests.faults.ledger $(ARGS)

faults: install ## Let each part fail at each point, and servers, network and clocks too (ARGS="-k name")
	@tests/servers/install.sh
	@$(BIN)/python -m pytest tests -m "faults or matrix" $(ARGS)

bench: install ## Measure (SCENARIO=confirms, ARGS=--help)
	@tests/servers/install.sh
	@$(BIN)/python -m tests.perf $(SCENARIO) $(ARGS)

constraints: ## Resolve the newest versions of everything and pin them in constraints.txt
	@.ci/venv .venv-newest /dev/null "$(PYTHON)"
	@{ head -n 2 constraints.txt; .venv-newest/bin/python -m pip freeze --all --exclude setuptools --exclude-editable; } > .venv-newest/constraints.txt
	@mv .venv-newest/constraints.txt constraints.txt && rm -rf .venv-newest

clean: ## Remove the environments, caches and builds
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
