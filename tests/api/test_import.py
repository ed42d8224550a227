"""`import edgespec` is light; each public name is imported on its first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import edgespec

HEAVY = ("llama_cpp", "mlx", "mlx_lm", "starlette", "textual", "click")


def test_no_runtime_is_imported_by_the_interface_itself() -> None:
    """`import edgespec` loads no other module of the package; benchmarks.startup has the time."""
    code = (
        "import sys; before = set(sys.modules); import edgespec;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {'edgespec'};"
        "new |= {name for name in sys.modules if name.startswith('edgespec.')};"
        "edgespec.load, edgespec.Reply, edgespec.Message;"
        f"sys.exit(str(new | set(sys.modules) & set({HEAVY!r}) or ''))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.stderr.strip() == ""


def test_every_public_name_exists() -> None:
    for name in edgespec.__all__:
        assert getattr(edgespec, name) is not None
    assert set(edgespec.__all__) <= set(dir(edgespec))


def test_every_error_is_exported() -> None:
    from edgespec import errors

    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.EdgespecError) and kind.__module__ == errors.__name__
    }
    assert kinds - {"NotReady"} <= set(edgespec.__all__), "the chat alone meets that one"


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'open_model'"):
        edgespec.open_model  # noqa: B018
