"""Fixtures: a hub served from a temporary folder, and a client with a cache of its own."""

from tests.hub.fixtures import gguf_path, hub, root, server

__all__ = ["gguf_path", "hub", "root", "server"]
