"""Copies of the trained EAGLE-3 head with other conventions in its files, for both runtimes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.gguf_models import REPOSITORY, TARGET

EAGLE3 = REPOSITORY / "tests" / "fixtures" / "heads" / "eagle3-python-6m"
LAYERS = (1, 3, 5)  # that it was trained on


def tamper(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A copy of the head with these values in config.json, and other tensors."""
    shutil.copytree(EAGLE3, path)
    stated = json.loads((EAGLE3 / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stated, **config}))
    if tensors:
        save_file({**load_file(EAGLE3 / "model.safetensors"), **tensors}, path / "model.safetensors")
    return path


def state_layers(path: Path, layers: tuple[int, ...]) -> Path:
    return tamper(path, {"eagle_aux_hidden_state_layer_ids": list(layers)})


def make_ids_absolute(path: Path) -> Path:
    """A copy whose d2t holds the target's ids instead of offsets."""
    offsets = load_file(EAGLE3 / "model.safetensors")["d2t"]
    return tamper(path, {}, {"d2t": offsets + np.arange(len(offsets))})


def convert(folder: Path) -> Path:
    """The head in `folder` as a GGUF file beside it."""
    path = folder.with_suffix(".gguf")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EDGESPEC_")}
    command = [sys.executable, "-m", "laboratory.eagle3_gguf", str(folder), str(TARGET), str(path)]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, timeout=120)
    return path
