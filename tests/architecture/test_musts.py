"""What no module may do with files and texts of strangers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_layers import MODULES, PACKAGE

CALLS = {"eval", "exec", "compile", "os.system", "os.popen", "marshal.loads", "torch.load", "yaml.load", "shelve.open"}
PICKLES = {"isolated.py", "client/link.py", "client/child.py"}  # what two processes of this program send each other
PARSERS = {"json.loads", "json.load", "tomllib.loads", "tomllib.load"}
DEPTH = {"RecursionError", "RuntimeError", "Exception", "BaseException"}


def name_of(node: ast.expr) -> str:
    return ast.unparse(node)


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def is_true(node: ast.expr | None) -> bool:
    return not (node is None or (isinstance(node, ast.Constant) and node.value in (False, None)))


def find_faults(tree: ast.AST, module: str) -> Iterator[str]:
    """Calls that run what is in a file or a text, and pickles of strangers."""
    for call in calls(tree):
        name = name_of(call.func)
        arguments = {each.arg: each.value for each in call.keywords}
        if name in CALLS or (name.startswith("pickle.") and "load" in name.lower() and module not in PICKLES):
            yield f"{module}:{call.lineno} calls {name}"
        if is_true(arguments.get("shell")) and name.startswith(("subprocess.", "Popen", "run")):
            yield f"{module}:{call.lineno} passes a text to a shell"
        if is_true(arguments.get("trust_remote_code")):
            yield f"{module}:{call.lineno} trusts the code of a model"


def find_shallow(tree: ast.AST, module: str) -> Iterator[str]:
    """Parsers whose errors are expected, but for that of a text that is nested too deep."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = {name_of(each) for handler in node.handlers for each in _types(handler.type)}
        elif isinstance(node, ast.With) and isinstance(node.items[0].context_expr, ast.Call):
            call = node.items[0].context_expr
            caught = {name_of(each) for each in call.args} if name_of(call.func) == "suppress" else set()
        else:
            continue
        parses = any(name_of(call.func) in PARSERS for statement in node.body for call in calls(statement))
        if parses and "ValueError" in caught and not caught & DEPTH:
            yield f"{module}:{node.lineno} expects no RecursionError"


def _types(node: ast.expr | None) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node] if node is not None else []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_runs_what_strangers_write(path: Path) -> None:
    tree, module = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(PACKAGE).as_posix()
    assert not [*find_faults(tree, module), *find_shallow(tree, module)]


FAULTS = (
    "eval(x)",
    "pickle.loads(x)",
    "torch.load(x)",
    "subprocess.run(x, shell=True)",
    "load(x, trust_remote_code=True)",
    "try:\n    json.loads(x)\nexcept (OSError, ValueError):\n    pass",
    "with suppress(ValueError):\n    json.loads(x)",
)


@pytest.mark.parametrize("text", FAULTS)
def test_what_they_may_not_do_is_found(text: str) -> None:
    tree = ast.parse(text)
    assert [*find_faults(tree, "x.py"), *find_shallow(tree, "x.py")]
