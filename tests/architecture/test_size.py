"""Limits of size: lines of a module and of a function, attributes of a class."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.models import REPOSITORY

PACKAGE = REPOSITORY / "edgespec"
MAX_MODULE_LINES = 600
LONGER: set[str] = set()  # modules that have yet to be cut
MAX_FUNCTION_LINES = 60
MAX_CLASS_ATTRIBUTES = 12


def definitions() -> Iterator[tuple[str, ast.AST]]:
    """("path:name", node) of every function and class of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"{path.relative_to(PACKAGE)}:{node.name}", node


def attributes(node: ast.ClassDef) -> set[str]:
    """What the methods of a class assign to `self`."""
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}


def test_a_module_is_one_subject() -> None:
    lines = {str(path.relative_to(PACKAGE)): path.read_text("utf-8").count("\n") for path in PACKAGE.rglob("*.py")}
    assert {name for name, count in lines.items() if count > MAX_MODULE_LINES} <= LONGER


def test_functions_fit_on_a_screen() -> None:
    lines = {
        name: node.end_lineno - node.lineno + 1
        for name, node in definitions()
        if not isinstance(node, ast.ClassDef) and isinstance(node, ast.stmt) and node.end_lineno is not None
    }
    long = {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES}
    assert not long


def test_classes_have_few_attributes() -> None:
    counts = {name: len(attributes(node)) for name, node in definitions() if isinstance(node, ast.ClassDef)}
    wide = {name: count for name, count in counts.items() if count > MAX_CLASS_ATTRIBUTES}
    assert not wide


def test_the_core_is_formatted_throughout() -> None:
    assert not [path.name for path in (PACKAGE / "core").rglob("*.py") if "fmt:" in path.read_text(encoding="utf-8")]


def test_sizes_are_measured() -> None:
    """A function and a class over the limits are seen."""
    source = "class A:\n    def b(self):\n        self.c = self.d = 1\n        self.e += 1\n        return self.f\n"
    (wide,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    assert attributes(wide) == {"c", "d", "e"}
