"""Identifies weights by their content, wherever they lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edgespec.errors import reading

_END_BYTES = 2**20  # of each end of a file


def fingerprint_weights(model: Path) -> str:
    """16 hexadecimal digits, a hash of the size and both ends of a weights file, or of each in a folder.

    Raises CacheError.

    To read 40 GB in full would take longer than the measurement that the store saves.
    """
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    digest = hashlib.sha256()
    for file in files:
        with reading(model), file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.name if model.is_dir() else ''}:{size};".encode())
            digest.update(opened.read(_END_BYTES))
            opened.seek(max(0, size - _END_BYTES))
            digest.update(opened.read(_END_BYTES))
    return digest.hexdigest()[:16]
