PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := .stamps/installed
PROTOS := $(wildcard proto/trivet/v1/*.proto)
SERVICE_PROTOS := $(foreach service,rollout reward trainer,proto/trivet/v1/$(service).proto)
CONFIG ?= configs/quickstart.yaml

# One thread a process: several processes share the cores, and more threads than cores slow all of them.
export OMP_NUM_THREADS ?= 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: install demo test check format proto proto-check lock clean

install: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/torch.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements/torch.txt
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	mkdir -p $(@D) && touch $@

demo: install
	$(BIN)/trivet up $(CONFIG)

test: install
	$(BIN)/python -m pytest tests/unit -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/integration

check: install proto-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Writes the typed stubs beside the .proto files.
proto: install
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -I proto --grpc_python_out=proto --mypy_grpc_out=proto $(SERVICE_PROTOS)

# Fails when the committed stubs are not what the .proto files give.
proto-check: install
	rm -rf build/proto && mkdir -p build/proto
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=build/proto --pyi_out=build/proto $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -I proto --grpc_python_out=build/proto --mypy_grpc_out=build/proto $(SERVICE_PROTOS)
	diff -r -x '*.proto' -x __pycache__ build/proto/trivet/v1 proto/trivet/v1 || (echo "generated code is stale: run 'make proto'"; exit 1)

# uv only resolves here; installing stays with pip, which takes the CPU wheel of torch where it is set up with one.
lock: install
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile requirements/cpu.in --override requirements/overrides.txt --python-version 3.11 --no-header --no-annotate -o requirements/cpu.txt

clean:
	rm -rf $(VENV) .stamps build
