"""Drafters, and the names that a package with one of its own imports; docs/write-a-drafter.md has an example."""

from edgespec.drafters.registry import DrafterSpec, SlotMemory, SlotResources

__all__ = ["DrafterSpec", "SlotMemory", "SlotResources"]
