"""The example of docs/write-a-backend.md runs, and its session passes the contract suite."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import pytest

from tests.contract import test_ahead, test_session
from tests.contract.toys import CONTEXT, Runtime
from tests.gguf_models import REPOSITORY

CHECKS = [
    check
    for module in (test_session, test_ahead)
    for name, check in vars(module).items()
    if name.startswith("test_") and list(inspect.signature(check).parameters) == ["runtime"]
]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names that the program defines, and what it prints as `printed`."""
    text = (REPOSITORY / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()) as output:
        exec(compile(program, "write-a-backend.md", "exec"), names)
    return {**names, "printed": output.getvalue()}


def test_drafts_save_rounds(example: dict[str, Any]) -> None:
    found = re.fullmatch(r"100 tokens in 99 rounds without drafts, in (\d+) with them\n", example["printed"])
    assert found and int(found[1]) < 90


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_its_session_keeps_the_contract(check: Callable[[Runtime], None], example: dict[str, Any]) -> None:
    table = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float32)
    check(Runtime("documented", lambda: example["BigramSession"](table, CONTEXT), 0.0))
