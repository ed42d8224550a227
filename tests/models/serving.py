"""What the hub tests serve, and a fetch for a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

from edgespec.models.hub import Hub
from tests.formats.ggufs import REPOSITORY, write_gguf

REPO = "someone/Model-GGUF"
FILE = "Model-Q4_K_M.gguf"

FETCH = """
import sys
from edgespec.models.hub import Hub
from edgespec.models.references import parse_reference
hub = Hub.from_environment()
print(hub.fetch(hub.resolve(parse_reference(sys.argv[1]))))
"""


def serve(root: Path, name: str = FILE, *, repo: str = REPO, pad_bytes: int = 0) -> Path:
    path = root / repo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(path, pad_bytes=pad_bytes)


def environment(hub: Hub) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    return kept | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(hub.cache_dir), "PYTHONPATH": str(REPOSITORY)}
