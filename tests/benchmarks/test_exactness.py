"""The benchmark of --exact runs on the embedded pair; no draft changes a text where it is promised."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import Program

pytestmark = pytest.mark.slow


def test_exactness(program: Program) -> None:
    result = program("benchmarks.exactness", "--quantize", "F16", "--prompts", 1, "--tokens", 8, "--context", 40)
    assert set(result["equal_texts"]) == set(result["logit_difference"]) == {"ordinary", "4 rows"}
    assert set(result["equal_texts"]["4 rows"].values()) == {"1 of 1"}
    assert result["logit_difference"]["4 rows"] == 0 < result["logit_difference"]["ordinary"]
    assert list(result["price"]) == [f"ordinary, {n} row{'s' * (n > 1)}" for n in (1, 2, 4, 8)]


def test_the_kernels_of_quantized_weights_are_compared_too(program: Program) -> None:
    result = program("benchmarks.exactness", "--price-only", "--context", 40, "--width", 2)
    assert set(result["logit_difference"]) == {"ordinary", "2 rows", "invariant kernels"}
    assert result["logit_difference"]["invariant kernels"] == 0 and result["equal_texts"] == {}
