"""What the hub tests serve, and a fetch in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from edgespec.hub.hub import Hub
from tests.formats.ggufs import REPOSITORY, write_gguf

REPO = "someone/Model-GGUF"
FILE = "Model-Q4_K_M.gguf"

FETCH = """
import sys
from edgespec.errors import EdgespecError
from edgespec.hub.hub import Hub
from edgespec.hub.cache import parse_reference
hub = Hub.from_environment()
try:
    print(hub.fetch(hub.resolve(parse_reference(sys.argv[1]))))
except EdgespecError as error:
    print(type(error).__name__, error.message, error.hint, sep="|")
    sys.exit(error.exit_code)
"""


def serve(root: Path, name: str = FILE, *, repo: str = REPO, pad_bytes: int = 0) -> Path:
    path = root / repo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(path, pad_bytes=pad_bytes)


def environment(hub: Hub, **changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    kept |= {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(hub.cache_dir), "PYTHONPATH": str(REPOSITORY)}
    return kept | changes


def fetch_elsewhere(hub: Hub, reference: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Fetch in a fresh process, where the client reads its environment anew."""
    command = [sys.executable, "-c", FETCH, reference]
    return subprocess.run(command, env=environment(hub, **changes), capture_output=True, text=True, timeout=60)
