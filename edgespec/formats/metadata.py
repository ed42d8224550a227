"""What is known of a model before it is loaded: its GGUF header, or its folder's config."""

from __future__ import annotations

from edgespec.formats.gguf import Header
from edgespec.formats.mlx_folder import Folder

ModelMetadata = Header | Folder
"""What is known of a model before it is loaded."""
