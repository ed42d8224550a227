"""What tokens follow which, added to a block's positions: they do not know each other's tokens by themselves.

The term is a product of low rank, as DSpark's head has it: a few megabytes, learned on one user's texts in seconds.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from edgespec.core.arrays import Logits
from edgespec.core.truncation import top_k
from edgespec.errors import CacheError, InvalidModelFile, reason_of
from edgespec.files import write_atomically
from edgespec.formats.head_file import read_safetensors_shapes

CANDIDATES = 32
"""The most probable tokens of a row, whose scores are changed."""
FILE = "bigram.safetensors"
"""The name of its file, in the folder of the version of a draft that it belongs to."""
_NAMES = ("markov_w1", "markov_w2")
_DTYPE = np.dtype("<f2")


class Bigram:
    """The score of token b after token a grows by first[a] . second[b]; both are [V, rank]."""

    def __init__(self, first: npt.NDArray[np.floating], second: npt.NDArray[np.floating]) -> None:
        """Raises ValueError for matrices of different shapes, and for numbers that are not finite."""
        if first.ndim != 2 or first.shape != second.shape:
            raise ValueError(f"matrices of {first.shape} and {second.shape} are no bigram term")
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            raise ValueError("its numbers are not finite")
        self._first, self._second = first.astype(np.float32), second.astype(np.float32)

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file of `save`. Raises InvalidModelFile, CacheError."""
        shapes = read_safetensors_shapes(path)
        try:
            data = path.read_bytes()
            start = 8 + struct.unpack("<Q", data[:8])[0]
            header = json.loads(data[8:start])
            arrays = []
            for name in _NAMES:
                low, high = header[name]["data_offsets"]
                arrays.append(np.frombuffer(data[start + low : start + high], _DTYPE).reshape(shapes[name]))
            return cls(arrays[0], arrays[1])
        except OSError as error:
            raise CacheError(f"{path} cannot be read: {reason_of(error)}.", hint="Check its permissions.") from error
        except (LookupError, ValueError) as error:
            raise InvalidModelFile(
                f"{path} is not what a draft has learned of pairs of tokens: {reason_of(error)}.",
                hint="Choose another version with `edgespec adapt use`.",
            ) from error

    def save(self, path: Path) -> None:
        """Write a file in the format of safetensors, with half precision. Raises OSError."""
        arrays = [np.ascontiguousarray(each, _DTYPE) for each in (self._first, self._second)]
        size, shape = arrays[0].nbytes, list(arrays[0].shape)
        header = {
            name: {"dtype": "F16", "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
            for i, name in enumerate(_NAMES)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        write_atomically(path, struct.pack("<Q", len(text)) + text + b"".join(each.tobytes() for each in arrays))

    @property
    def vocab_size(self) -> int:
        """V"""
        return len(self._first)

    def adjust(self, logits: Logits, previous: int) -> Logits:
        """A copy of a row [V] for the case that it follows the token `previous`."""
        changed = logits.copy()
        if previous < self.vocab_size:
            best = top_k(logits[: self.vocab_size], min(CANDIDATES, self.vocab_size))
            changed[best] += self._second[best] @ self._first[previous]
        return changed


def find_bigram(draft: Path) -> Bigram | None:
    """What was learned for the adapted draft at a path, in the same folder; None where there is nothing.

    Raises InvalidModelFile, CacheError.
    """
    path = draft.parent / FILE
    return Bigram.read(path) if path.is_file() else None
