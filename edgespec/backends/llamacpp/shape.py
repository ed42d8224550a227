"""Model files of fewer blocks and zero weights, to time forwards on."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from edgespec.backends.llamacpp.rewrite import write_blocks
from edgespec.errors import CacheError
from edgespec.formats.gguf import Header

_SPARE_BYTES = 256 * 2**20  # left free on the disk


def write_shape(header: Header, blocks: int, path: Path) -> None:
    """Write a GGUF file with the first `blocks` blocks of the model that `header` describes; all weights are zero.

    The time of a forward does not depend on the weights, except that a zero router chooses the same experts for every
    row. Raises CacheError if the disk is too small.
    """
    needed = sum(tensor.nbytes for tensor in header.tensors if tensor.block < blocks) + _SPARE_BYTES
    if shutil.disk_usage(path.parent).free < needed:
        raise CacheError(
            f"{path.parent} has no room for a measurement of {needed / 2**30:.1f} GiB.", hint="Free some disk space."
        )
    write_blocks(header, range(blocks), path, lambda tensor: np.zeros(tensor.nbytes, np.uint8))
