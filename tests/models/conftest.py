"""Fixtures: a hub served from a temporary folder, and a client with a cache of its own."""

from tests.models.fixtures import hub, root, server

__all__ = ["hub", "root", "server"]
