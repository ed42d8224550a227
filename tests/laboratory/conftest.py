"""The real command, for tests that plan models of the laboratory."""

from tests.cli.conftest import cli, environment

__all__ = ["cli", "environment"]
