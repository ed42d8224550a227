"""Import layers: what may import what, and that nothing heavy is imported before a model is opened."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf_models import REPOSITORY

PACKAGE = REPOSITORY / "edgespec"
# Lowest first. A package imports itself and the layers below its own.
LAYERS = (
    ("errors", "files", "folders", "installation", "options", "progress", "sockets", "units"),
    ("cancel", "databases", "proxies"),
    ("isolated",),
    ("core", "formats", "memory", "text"),
    ("machines",),
    ("backends", "drafters"),
    ("autopilot",),
    ("models",),
    ("engine",),
    ("train",),
    ("client",),
    ("answers",),
    ("bench", "export"),
    ("api", "chat", "server"),
    ("cli",),
)
RUNTIMES = ("llama_cpp", "mlx", "mlx_lm")
# Third-party packages that a layer may import at all.
ALLOWED = {
    "cancel": set(),
    "databases": set(),
    "errors": set(),
    "isolated": {"psutil"},
    "files": set(),
    "folders": {"platformdirs"},
    "installation": set(),
    "options": set(),
    "progress": set(),
    "proxies": {"httpx"},
    "sockets": set(),
    "units": set(),
    "core": {"numpy"},
    "formats": {"numpy", "safetensors"},
    "memory": {"numpy", "pathspec"},
    "text": {"numpy", "jinja2"},
    "backends": {"numpy", "psutil", "gguf", "llama_cpp", "mlx", "mlx_lm", "transformers"},
    "drafters": {"numpy"},
    "machines": {"numpy", "psutil"},
    "autopilot": {"numpy"},
    "models": {"huggingface_hub", "httpx", "numpy", "platformdirs", "pydantic"},
    "engine": {"numpy", "llguidance", "pydantic"},
    "bench": {"numpy", "pydantic"},
    "export": set(),
    "client": {"psutil"},
    "answers": set(),
    "train": {"numpy", "psutil", "gguf", "mlx", "mlx_lm", "transformers", "safetensors"},
    "server": {"numpy", "starlette", "pydantic", "pydantic_core", "prometheus_client", "uvicorn", "httpx"},
    "chat": {"pydantic", "textual", "rich", "psutil", "markdown_it", "pygments"},
    "api": set(),
    "cli": {"click", "psutil", "readline", "httpx", "jinja2"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def group_of(path: Path) -> str | None:
    """The layer member a file belongs to; the command runs the package, and its own __init__ is in none."""
    first = path.relative_to(PACKAGE).parts[0]
    return {"__init__.py": None, "__main__.py": "cli"}.get(first, first.removesuffix(".py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at whatever depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_respect_the_layers(path: Path) -> None:
    group = group_of(path)
    if group is None:
        return
    level = {member: i for i, members in enumerate(LAYERS) for member in members}
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "edgespec":
            if len(parts) == 1:
                continue
            assert parts[1] == group or level[parts[1]] < level[group], f"{group} must not import {name}"
        elif parts[0] not in sys.stdlib_module_names:
            assert parts[0] in ALLOWED[group], f"{group} must not import {name}"


def test_every_module_belongs_to_a_layer() -> None:
    groups = {group for path in MODULES if (group := group_of(path))}
    assert groups == {member for members in LAYERS for member in members}


COMMANDS = ("--help", "list", "doctor", "run --help", "completion bash")
PROGRAM = f"""
import sys
from edgespec.cli.main import run
for command in {COMMANDS}:
    run(command.split())
    unwanted = {{'numpy', 'huggingface_hub', 'jinja2'}} if command == '--help' else set({RUNTIMES})
    if loaded := unwanted & set(sys.modules):
        sys.exit(f'{{command}} imported {{loaded}}')
"""


def test_commands_import_no_runtime_and_help_not_even_numpy(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert "Usage: edgespec run" in child.stdout
