"""Trained heads among the files of models."""

from __future__ import annotations

import struct
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.formats.head_file import read_head

_START_BYTES = 2**20  # of a GGUF file; converters write its hyperparameters before the vocabulary
_MAX_HEADER_BYTES = 2**24  # with a vocabulary of 260,000 tokens 10 MB
_MTP_KEY = b".nextn_predict_layers"
_FIRST_LAYER = b"blk.0."  # of tensors that a file of MTP layers alone does not have
_ARCHITECTURES = [  # entries of GGUF files that hold a head alone: key, type of the value, its length, the value
    b"general.architecture" + struct.pack("<IQ", 8, len(name)) + name
    for name in (b"eagle3", b"dflash", b"gemma4-assistant")
]


def is_head(path: Path) -> bool:
    """Tells whether a file or folder holds a trained head and no model. False for what cannot be read.

    Of most GGUF files only the first MiB is read.
    """
    try:
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(_START_BYTES)
                if any(entry in start for entry in _ARCHITECTURES):
                    return True
                if _MTP_KEY not in start or _FIRST_LAYER in start + file.read(_MAX_HEADER_BYTES - _START_BYTES):
                    return False
        head = read_head(path)
    except (EdgespecError, OSError):
        return False
    return head is not None and not head.in_target
