"""The checkpoint of a training run, a file of safetensors that is replaced as a whole.

Whatever a killed process or a full disk leaves, the last one that was complete is there.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from edgespec.errors import CacheError, reason_of
from edgespec.files import replace_file
from edgespec.train.options import CHECKPOINT, TrainOptions
from edgespec.train.parts import removed_while_running


def save_checkpoint(folder: Path, arrays: dict[str, mx.array], state: dict[str, Any], options: TrainOptions) -> None:
    """Replace the checkpoint of a run.

    Raises InvalidRequest if the folder was removed, which ends the run that is in it; CacheError.
    """
    try:
        with replace_file(folder / CHECKPOINT, 0o600) as partial, partial.open("r+b") as file:
            mx.save_safetensors(file, arrays, {"state": json.dumps(state), "options": json.dumps(asdict(options))})
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise removed_while_running() from error
    except OSError as error:
        raise CacheError(
            f"the training in {folder} cannot be saved: {reason_of(error)}.",
            hint="Free some space and start again: it goes on from the last checkpoint.",
        ) from error


def load_checkpoint(folder: Path, options: TrainOptions) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
    """(arrays, state) of the checkpoint; None if there is none, or one of other options."""
    for leftover in folder.glob(f".{CHECKPOINT}.*"):  # of a process that was killed while it wrote
        leftover.unlink(missing_ok=True)
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        arrays, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
        mx.eval(arrays)  # the file will be replaced
        state, is_ours = json.loads(metadata["state"]), json.loads(metadata["options"]) == asdict(options)
    except (RuntimeError, ValueError, KeyError):  # it is damaged; a RecursionError is a RuntimeError
        return None
    return (arrays, state) if is_ours else None
