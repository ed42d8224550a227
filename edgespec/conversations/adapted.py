"""Where the drafts lie that were adapted to their user."""

from __future__ import annotations

from pathlib import Path

from edgespec.conversations.database import data_folder


def adapted_folder() -> Path:
    """The folder of the user's adapted drafts; it may be missing."""
    return data_folder() / "adapted"
