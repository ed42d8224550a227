"""Metadata of a model before it is loaded: a GGUF header, or the config of a folder."""

from __future__ import annotations

from edgespec.formats.gguf import Header
from edgespec.formats.mlx_folder import Folder

ModelMetadata = Header | Folder
"""Metadata of a model before it is loaded."""
