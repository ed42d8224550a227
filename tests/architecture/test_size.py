"""Limits of size: lines of a module and of a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.gguf_models import REPOSITORY

PACKAGE = REPOSITORY / "edgespec"
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """("path:name", node) of every function of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(PACKAGE)}:{node.name}", node


def test_a_module_is_one_subject() -> None:
    lines = {str(path.relative_to(PACKAGE)): path.read_text("utf-8").count("\n") for path in PACKAGE.rglob("*.py")}
    assert {name for name, count in lines.items() if count > MAX_MODULE_LINES} == set()


def test_functions_fit_on_a_screen() -> None:
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    long = {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES}
    assert not long


def test_the_core_is_formatted_throughout() -> None:
    assert not [path.name for path in (PACKAGE / "core").rglob("*.py") if "fmt:" in path.read_text(encoding="utf-8")]


def test_a_module_has_no_sections() -> None:
    """Comments alone between two empty lines begin another subject, which is a module of its own."""
    found = []
    for folder in ("edgespec", "tests", "benchmarks", "laboratory"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            lines = path.read_text("utf-8").split("\n")
            for i in range(1, len(lines) - 1):
                if lines[i].startswith("#") and not lines[i - 1]:
                    end = next(j for j in range(i, len(lines)) if not lines[j].startswith("#"))
                    found += [f"{path.relative_to(REPOSITORY)}:{i + 1}"] if not lines[end] else []
    assert not found
