# The same targets for people and for CI. Everything works without network once `make setup` has run.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
STAMP := .venv/.installed
CONTAINER_STAMP := .venv/.installed-container
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt
# Interpreters that are tried, in this order: the first of a supported version that can make a virtual environment.
PYTHONS ?= python3 python3.13 python3.12 python3.11 python3.14
# Test processes at a time, one more than the cores of a small machine, for some of their time they wait. One thread
# each: tiny tensors gain nothing from more.
WORKERS ?= 3
# The same for tests on GPUs, which take turns on all that are visible. Compiling needs cores.
GPU_WORKERS ?= $(shell echo $$(( ($$(nproc) + 3) / 4 )))
IMAGE ?= trainer:0.1.0-cpu
# Bytecode is kept whatever the machine says: tests start hundreds of processes, and each would compile the package anew.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# pytest's code 5 is "no test selected", which is no failure where a marker selects tests.
OR_NONE := || { code=$$?; [ $$code -eq 5 ] || exit $$code; }
# Collecting all tests takes half a minute.
CONTAINER_TESTS := tests/container tests/unit/container_files tests/unit/queue/clusters
SHELL_FILES = .ci/run $(shell find . \( -name '*.sh' -o -name '*.sbatch' \) -not -path './.venv/*' -not -path './build/*')

.PHONY: help setup demo test test-slow test-browser test-container test-gpu test-slurm lint type pins docs golden scan clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with everything pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@supported='import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))'; \
	if [ ! -x $(BIN)/python ]; then \
		for python in $(PYTHONS); do \
			if "$$python" -c "$$supported" >/dev/null 2>&1; then found=$$python; break; fi; \
		done; \
		if [ -z "$${found:-}" ]; then \
			echo "error: none of '$(PYTHONS)' is Python 3.11 to 3.14 with the venv module." >&2; \
			echo "    -> install one (Debian, Ubuntu: apt-get install python3-venv), or: make setup PYTHONS=/path/to/python3" >&2; \
			exit 1; \
		fi; \
		echo "making .venv with $$("$$found" --version)"; \
		"$$found" -m venv .venv; \
	fi
	@echo "installing what constraints.txt pins (some minutes the first time)"
	@# torch first: a build that pip is configured to find locally is taken before another package asks for torch.
	@$(PIP) torch==2.13.0 setuptools
	@$(PIP) --no-build-isolation -e '.[dev]'
	@# pip would make the bytecode on one core. Templates among the packages are no Python: that is no failure.
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

demo: $(STAMP) ## teach a tiny model a style in some minutes, prove it and see it; no network and no GPU needed
	@HF_HUB_OFFLINE=1 $(BIN)/python -m scripts.demo

test: $(STAMP) ## all tests that run anywhere
	@$(TEST_ENV) $(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not gpu and not slow and not container and not browser and not slurm"

test-slow: $(STAMP) ## what takes a minute each: every family's whole way on real-shaped data; FEW=1 has one family a kind
	@$(TEST_ENV) $(BIN)/pytest -q -n $(WORKERS) --dist worksteal \
		-m "slow and not gpu and not slurm and not browser and not container$(if $(FEW), and not alike)" $(OR_NONE)

test-browser: $(STAMP) ## the studio in Debian's Chromium; as root it installs that; PICTURES=docs/images takes the documents' pictures
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! [ -x /usr/bin/chromium ]; then \
		echo "installing chromium"; \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	fi
	@$(TEST_ENV) PICTURES=$(PICTURES) $(BIN)/python -m scripts.loopback_only $(BIN)/pytest -q -m browser tests/browser $(OR_NONE)

$(CONTAINER_STAMP): $(STAMP)
	@$(PIP) --no-build-isolation -e '.[dev,container]'
	@touch $@

test-container: $(CONTAINER_STAMP) ## images, real containers, compose files and manifests; as root it installs and starts an engine
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& ! { { docker buildx version || command -v dockerd; } && command -v debootstrap; } >/dev/null 2>&1; then \
		echo "installing docker.io and debootstrap"; \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io debootstrap >/dev/null; \
	fi
	@$(TEST_ENV) $(BIN)/pytest -q -m container $(CONTAINER_TESTS) $(OR_NONE)

test-gpu: $(STAMP) ## tests that need a CUDA device
	@# counts of activations run side by side on every GPU by themselves, each with one thread of its compiler
	@GPU_TURNS=1 $(TEST_ENV) $(BIN)/pytest -q -n $(GPU_WORKERS) --dist loadgroup -m gpu --ignore tests/gpu/test_activations.py $(OR_NONE)
	@TORCHINDUCTOR_COMPILE_THREADS=1 $(TEST_ENV) $(BIN)/pytest -q -m gpu tests/gpu/test_activations.py $(OR_NONE)

test-slurm: $(STAMP) ## the batch script and the queue's launcher in a real Slurm of two nodes; as root, it installs that
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v slurmctld && command -v munged; } >/dev/null; then \
		echo "installing slurm-wlm and munge"; \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; \
	fi
	@$(TEST_ENV) $(BIN)/pytest -q -m slurm tests/slurm $(OR_NONE)

lint: $(STAMP) ## ruff, import-linter, shellcheck, hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/shellcheck $(SHELL_FILES)
	@if [ -e docker/Dockerfile ]; then echo $(BIN)/hadolint docker/Dockerfile; $(BIN)/hadolint docker/Dockerfile; fi

type: $(STAMP) ## mypy, strict below the data floor
	$(BIN)/mypy

pins: $(STAMP) ## every pin has a wheel for each platform, none is missing or not needed (asks the package index)
	@$(BIN)/python -m scripts.check_pins

docs: $(STAMP) ## write the generated files: schema.json, families.md, benchmarks.md, coming-from.md, doctor.md, tables of DOCKER.md, compose/variables.env, k8s' copies
	@mkdir -p build
	$(BIN)/trainer config schema > build/schema.json
	$(BIN)/trainer families --markdown > build/families.md
	mv build/schema.json train_configs/schema.json
	mv build/families.md docs/families.md
	$(BIN)/python -m bench page
	$(BIN)/python -m scripts.render_docker_md
	$(BIN)/python -m scripts.render_compose
	$(BIN)/python -m scripts.render_coming_from
	$(BIN)/python -m scripts.render_doctor
	$(BIN)/python -m scripts.render_k8s

golden: $(STAMP) ## write the golden files anew; read the diff before you commit it
	$(TEST_ENV) $(BIN)/python -m tests.golden.update

scan: ## known flaws in the packages of an image: make scan IMAGE=trainer:0.1.0-cpu (needs trivy or grype)
	@if command -v trivy >/dev/null; then trivy image --scanners vuln --ignore-unfixed $(IMAGE); \
	elif command -v grype >/dev/null; then grype $(IMAGE) --only-fixed; \
	else echo "error: neither trivy nor grype is installed" >&2; exit 1; fi

clean: ## remove what builds and tests leave; keeps .venv and runs/
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
