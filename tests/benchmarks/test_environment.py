"""The comparison of environments runs on the embedded pair."""

from __future__ import annotations

from tests.benchmarks.conftest import Program, Run
from tests.gguf_models import TARGET


def test_environment(program: Program) -> None:
    variable = "GLIBC_TUNABLES=glibc.malloc.hugetlb=0"
    amounts = ("--pairs", 2, "--turns", 2, "--burst", 2, "--pause-ms", 0.1, "--rows", 2)
    result = program("benchmarks.environment", TARGET, "--set", variable, *amounts)
    assert result["set"] == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"} and result["pairs"] == 2
    for clock in ("elapsed", "cpu"):
        found = result[clock]
        assert found["without_ms"] > 0 and found["with_ms"] > 0
        assert 0 < found["ratio_min"] <= found["ratio_median"] <= found["ratio_max"]


def test_variables_reach_one_process_of_a_pair(run_module: Run) -> None:
    done = run_module("benchmarks.environment", TARGET, "--set", "LLAMA_CPP_LIB_PATH=/nowhere", "--pairs", 1)
    assert done.returncode == 1 and "Error: a process ended before its answer." in done.stderr
    assert done.stderr.count("llama.cpp is installed but does not load") == 1


def test_what_is_not_an_assignment_is_refused(run_module: Run) -> None:
    done = run_module("benchmarks.environment", TARGET, "--set", "GOMP_SPINCOUNT")
    assert done.returncode == 2 and "'GOMP_SPINCOUNT' is not NAME=VALUE" in done.stderr
