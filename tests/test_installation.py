"""Commands that install packages, by the way edgespec is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgespec.installation import install_command


@pytest.mark.parametrize(
    ("folder", "file", "plain", "upgrade"),
    [
        ("pipx/venvs/es", "pyvenv.cfg", "pipx runpip es install 'a[b]'", "pipx runpip es install --upgrade 'a[b]'"),
        ("es", "uv-receipt.toml", "uv tool install --with 'a[b]' es", "uv tool install --upgrade --with 'a[b]' es"),
        ("es", "pyvenv.cfg", "uv pip install 'a[b]'", "uv pip install --upgrade 'a[b]'"),
        ("es", "other", "pip install 'a[b]'", "pip install --upgrade 'a[b]'"),
    ],
)
def test_packages_are_installed_as_edgespec_was(
    folder: str, file: str, plain: str, upgrade: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / folder
    prefix.mkdir(parents=True)
    (prefix / file).write_text("home = x\nuv = 0.9\n")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert install_command("a[b]") == plain
    assert install_command("a[b]", "--upgrade") == upgrade
