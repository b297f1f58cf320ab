# Two commands to begin with: `make demo` and `make test`. Each sets up what it needs, once.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-cluster test-release test-runtimes check lock wheel bench ui clean stale

# Make splits names at spaces: a command would work on other folders than this one.
ifneq ($(words $(CURDIR)),1)
$(error groundswell: make does not work in a path with spaces: $(CURDIR))
endif

VENV := $(CURDIR)/.venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
LIBRARIES := models/compression/kernels pipelines/dataset/gather
COMPILED := hatch_build.py models/compiled.py $(wildcard $(LIBRARIES:%=%/*.cc) $(LIBRARIES:%=%/*.h))
PORT ?= 5000
# Two processes of tests, each with a Spark session of its own: much of a test's time is waiting.
TEST_PROCESSES ?= -n 2 --dist loadfile --no-loadscope-reorder
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/groundswell
export PYSPARK_PYTHON := $(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(BIN)/python
# Where it is set, every new interpreter compiles all that it imports: 10 s for TensorFlow.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## Make the environment (.venv) from the lock, Horovod built for this TensorFlow
# Made again where its Python is gone, and where it has not the link to this folder: it was copied, or has a wheel.
STALE := $(shell [ ! -e $(READY) ] || { $(BIN)/python -c '' && grep -qxF '$(CURDIR)' $(VENV)/lib/python3*/site-packages/_groundswell.pth; } >/dev/null 2>&1 || echo stale)
$(READY): $(if $(STALE),stale) requirements.lock pyproject.toml docker/horovod/install.sh docker/horovod/uv.sh $(shell find docker/horovod/include -type f) $(COMPILED)
	@bash docker/horovod/check_host.sh
	@bash docker/horovod/install.sh $(VENV) cpu --editable
	@touch $@

demo: $(READY) ## Generate an archive, prepare, train, evaluate: minutes. ARCHIVE=folder takes your BigEarthNet v2.0
	@$(BIN)/groundswell demo $(if $(ARCHIVE),--archive '$(subst ','\'',$(ARCHIVE))')

test: $(READY) ## Run all tests but the long ones and those over several hosts
	@$(BIN)/pytest -m "not cluster and not long and not release" $(TEST_PROCESSES) $(PYTEST_ARGS)

test-long: $(READY) ## Run the long tests
	@export GROUNDSWELL_TEST_PATIENCE=$${GROUNDSWELL_TEST_PATIENCE:-3}; \
	  $(BIN)/pytest -m "long and not cluster and not release" $(TEST_PROCESSES) $(PYTEST_ARGS)  # ranks of both share the cores

test-cluster: $(READY) ## Run the tests over several hosts: network namespaces, needs root
	@$(BIN)/pytest -m cluster $(PYTEST_ARGS) tests/cluster

test-release: $(READY) ## Run what `make check` asks for when its inputs have changed: rivals' benchmarks, the wheel's extras
	@$(BIN)/python tests/release.py --run

test-runtimes: $(READY) ## Try the wheel with the versions of Databricks' runtimes: RUNTIME=17.3, or all; GiB, not in CI
	@$(BIN)/python tests/runtimes/run.py $(RUNTIME) $(if $(FOLDER),--folder $(FOLDER))

check: $(READY) ## Lint, types, import directions, sizes of files and folders, plain English, lock up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --cache-dir $(CACHE)/mypy
	@$(BIN)/lint-imports --cache-dir $(CACHE)/import-linter
	@PATH=$(BIN):$$PATH hadolint --config docker/.hadolint.yaml docker/*.Dockerfile
	@PATH=$(BIN):$$PATH shellcheck .ci/run $$(find docker jobs -name '*.sh')
	@bash docker/horovod/lock.sh --check
	@$(BIN)/python tests/house.py
	@$(BIN)/python tests/release.py

lock: $(READY) ## Resolve the dependencies again and write both locks
	@bash docker/horovod/lock.sh

wheel: ## Build Groundswell's own wheel into dist/
	@source docker/horovod/uv.sh; if lacks_compiler; then missing "a C++ compiler ($${CXX:-g++})" g++; fi; bring_uv $(VENV)-uv; \
	"$$uv" build --quiet --wheel; ls dist/groundswell-*.whl

bench: $(READY) ## Run one benchmark: make bench NAME=train; ARGS=... are its own. Without NAME: list them
	@if [ -z "$(NAME)" ]; then \
	  for file in tests/benchmarks/*.py; do \
	    printf 'NAME=%-13s %s\n' "$$(basename $$file .py)" "$$(sed -n '1s/"""//gp' $$file)"; \
	  done; \
	elif [ ! -f "tests/benchmarks/$(NAME).py" ]; then \
	  echo "no benchmark '$(NAME)': NAME=... is one of $$(cd tests/benchmarks && ls *.py | sed 's/\.py//' | xargs)" >&2; \
	  exit 2; \
	else \
	  $(BIN)/python tests/benchmarks/$(NAME).py $(ARGS); \
	fi

ui: $(READY) ## Open MLflow's page on the recorded runs
	@store="$$($(BIN)/python -c 'from pipelines.tracking.store.store import tracking_uri; print(tracking_uri())')"; \
	  case "$$store" in http*|databricks*) echo "the runs are at MLFLOW_TRACKING_URI"; exit 0 ;; esac; \
	  echo "http://127.0.0.1:$(PORT)/#/experiments?workflowType=machine_learning (Ctrl-C ends it)"; \
	  MLFLOW_BACKEND_STORE_URI="$$store" exec $(BIN)/mlflow ui --host 127.0.0.1 --port $(PORT)

# The demo's folders are removed where its generated archive shows that they are the demo's. Those of your own archive
# (demo-*) stay.
DEMO_FOLDERS := demo/BigEarthNet-generated demo/dataset demo/dataset.incomplete demo/outputs
clean: ## Remove the environment and what the demo made of its generated archive
	rm -rf $(VENV) $(VENV)-uv $(wildcard $(LIBRARIES:%=%/*.so) $(LIBRARIES:%=%/.build-*))
	@if [ -d demo/BigEarthNet-generated ]; then \
	  echo rm -rf $(DEMO_FOLDERS); rm -rf $(DEMO_FOLDERS); rmdir --ignore-fail-on-non-empty demo; fi
