"""docs/cli.md is what the commands say of themselves."""

from __future__ import annotations

from edgespec.cli.reference import reference
from tests.models import REPOSITORY


def test_the_command_reference_is_current() -> None:
    current = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    assert current == reference(), "run: python -m edgespec.cli.reference > docs/cli.md"
