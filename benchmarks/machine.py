"""What every figure has to carry: machine, versions, file hash."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from edgespec.controller.store import describe_machine


def describe(*models: Path) -> dict[str, Any]:
    """Processor, system, versions, and the first digits of the SHA-256 of each model's weights."""
    return {
        **describe_machine(),
        "files": {str(file.relative_to(file.parent.parent)): _sha256(file) for file in map(_weights_of, models)},
    }


def _weights_of(model: Path) -> Path:
    """The file that holds a model's weights: the model itself, or the first shard of its folder."""
    return min(model.glob("model*.safetensors")) if model.is_dir() else model


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
