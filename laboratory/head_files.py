"""What the converters of trained heads to GGUF files share."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from safetensors.numpy import load_file

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by name."""
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}
