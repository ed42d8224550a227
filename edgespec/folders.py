"""The folders in which this program keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

MEMORY, ADAPTED = "memory", "adapted"
"""Folders in the data folder."""


def cache_folder() -> Path:
    """The folder of what can be measured or built again: EDGESPEC_CACHE_DIR, or the platform's cache folder."""
    import platformdirs

    configured = os.environ.get("EDGESPEC_CACHE_DIR")
    return Path(configured) if configured else platformdirs.user_cache_path("edgespec")


def data_folder() -> Path:
    """The folder of conversations: EDGESPEC_DATA_DIR, or the platform's data folder."""
    import platformdirs

    configured = os.environ.get("EDGESPEC_DATA_DIR")
    return Path(configured) if configured else platformdirs.user_data_path("edgespec")


def memory_folder() -> Path:
    """The folder of the user's memory; it may be missing."""
    return data_folder() / MEMORY


def adapted_folder() -> Path:
    """The folder of the user's adapted drafts; it may be missing."""
    return data_folder() / ADAPTED
