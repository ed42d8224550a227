"""Folders as other programs leave them, with the packaged models in them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

MODEL_LAYER = "application/vnd.ollama.image.model"


def put(source: Path, path: Path) -> Path:
    """A copy of `source` at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(source, path))


def ollama_blob(store: Path, data: bytes) -> str:
    """Store a blob; returns its digest."""
    digest = hashlib.sha256(data).hexdigest()
    path = store / "blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return f"sha256:{digest}"


def ollama_manifest(weights: Path, store: Path, **more: Any) -> dict[str, Any]:
    """A manifest of one model layer, whose blob is a copy of `weights`, and of a template; `more` goes into it too."""
    layers = [
        {"mediaType": MODEL_LAYER, "digest": ollama_blob(store, weights.read_bytes()), "size": weights.stat().st_size},
        {
            "mediaType": "application/vnd.ollama.image.template",
            "digest": ollama_blob(store, b"{{ .Prompt }}"),
            "size": 13,
        },
    ]
    return {"schemaVersion": 2, "layers": layers, **more}


def ollama(store: Path, name: str, manifest: object, top: str = "manifests") -> Path:
    """Write a manifest; `name` is HOST/NAMESPACE/MODEL/TAG."""
    path = store / top / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest), encoding="utf-8")
    return path
