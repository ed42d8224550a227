"""Import rules of the code outside the package: benchmarks/, laboratory/ and tests/."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gguf_models import REPOSITORY

# Folder -> the first-party packages that it may import, besides itself.
ALLOWED = {
    "edgespec": set(),
    "benchmarks": {"edgespec"},
    "laboratory": {"edgespec", "benchmarks"},
    "tests": {"edgespec"},
    "tests/agents": {"edgespec", "laboratory"},
    "tests/benchmarks": {"edgespec", "benchmarks"},
    "tests/laboratory": {"edgespec", "laboratory"},
    "tests/engine": {"edgespec", "benchmarks", "laboratory"},
    "tests/real": {"edgespec", "benchmarks", "laboratory"},
    "tests/text": {"edgespec", "laboratory"},
}


def find_imports(path: Path) -> Iterator[str]:
    """The top-level name of every module that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def innermost(path: Path) -> str:
    """The longest folder of ALLOWED that contains a file."""
    name = path.relative_to(REPOSITORY).as_posix()
    return max((folder for folder in ALLOWED if name.startswith(f"{folder}/")), key=len)


@pytest.mark.parametrize("package", ["edgespec", "benchmarks", "laboratory", "tests"])
def test_imports_between_the_top_level_folders(package: str) -> None:
    packages = {folder for folder in ALLOWED if "/" not in folder}
    for path in (REPOSITORY / package).rglob("*.py"):
        others = (set(find_imports(path)) & packages) - {package}
        assert others <= ALLOWED[innermost(path)], f"{path.relative_to(REPOSITORY)} imports {sorted(others)}"


def test_a_tests_folder_has_its_own_rule() -> None:
    assert innermost(REPOSITORY / "tests" / "laboratory" / "test_x.py") == "tests/laboratory"
    assert innermost(REPOSITORY / "tests" / "core" / "test_x.py") == "tests"
