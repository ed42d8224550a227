"""Makers of synthetic models, and programs that measure nothing else. Nothing in edgespec/ imports this package."""
