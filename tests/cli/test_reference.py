"""docs/cli.md is what the commands say of themselves."""

from __future__ import annotations

import subprocess
import sys

from tests.models import REPOSITORY


def test_the_command_reference_is_current() -> None:
    """In a process of its own: click keeps what it has worked out of a command, whoever asked first."""
    made = subprocess.run([sys.executable, "-m", "edgespec.cli.reference"], capture_output=True, check=True, timeout=60)
    current = (REPOSITORY / "docs" / "cli.md").read_bytes()
    assert current == made.stdout, "run: python -m edgespec.cli.reference > docs/cli.md"
