# Every target works with nothing but GNU make, Python 3.11 to 3.13 and pip: the first one builds .venv.
# Choose the interpreter with PYTHON=..., pass arguments on with ARGS=...

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := smollm2-135m
TYPED := $(wildcard agentkv examples benchmarks tests/typing)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv model demo test lint format bench clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## build .venv with every extra

# The stamp is removed first and written last: an interrupted install starts over instead of looking finished.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "agentkv: no '$(PYTHON)' found; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "agentkv needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % v)'
	@if [ -f $@ ]; then rm -f $@; echo "agentkv: updating $(VENV)"; \
	else echo "agentkv: building $(VENV); installing torch takes a few minutes"; "$(PYTHON)" -m venv --clear $(VENV); fi
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[transformers,langchain,otel,dev]'
	@touch $@
	@echo "agentkv: $(VENV) is ready"

model: $(STAMP) ## fetch the small model that demo and tests run on
	$(BIN)/agentkv model pull $(MODEL)

# The model lies on disk by then: nothing may reach for a model hub.
demo test bench: export HF_HUB_OFFLINE := 1

demo: model ## run the support desk example
	@mkdir -p build
	$(BIN)/python -m examples.support_desk --json build/demo.json $(ARGS)

test: export AGENTKV_REQUIRE_ALL := 1
test: model ## run all tests; a skipped test is a failure
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## check format, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(TYPED)

format: $(STAMP) ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: model ## run the benchmarks in their quick profile
	@mkdir -p build
	@set -e; for file in benchmarks/[a-z]*.py benchmarks/[a-z]*/__main__.py; do \
		[ -f "$$file" ] || continue; \
		name=$${file#benchmarks/}; name=$${name%/__main__.py}; name=$${name%.py}; \
		echo "agentkv: benchmark $$name"; \
		$(BIN)/python -m benchmarks.$$name --profile quick --json build/bench-$$name.json $(ARGS); \
	done

clean: ## remove what builds and tools left behind
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find agentkv benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove .venv too
	rm -rf $(VENV)
