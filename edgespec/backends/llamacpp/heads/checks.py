"""Checks of the numbers in a head's file, on which llama.cpp would end the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgespec.backends.llamacpp.heads.contexts import DraftContext
from edgespec.errors import reading
from edgespec.formats.gguf import Header, TensorInfo

OpenContext = Callable[..., DraftContext]
"""Makes a head's llama_context, given the library, the weights, the parameters and settings."""


def require(header: Header, is_met: bool, problem: str) -> None:
    """Raises InvalidModelFile for a file on which llama.cpp would abort, perhaps after it has loaded it."""
    if not is_met:
        raise header.invalid(problem)


def check_ids(header: Header, path: Path, d2t: TensorInfo, rows: int, vocab_size: int) -> None:
    """Raises InvalidModelFile unless `d2t` names a token of the target for each of the output matrix' `rows`."""
    is_whole = d2t.type.name == "I64" and d2t.shape == (rows,)
    require(header, is_whole, f"d2t does not name a token for each of the {rows} rows of its output matrix")
    with reading(path):
        ids = np.fromfile(path, "<i8", rows, offset=header.data_offset + d2t.offset)
    is_known = len(ids) == rows and ids.min() >= 0 and ids.max() < vocab_size
    require(header, bool(is_known), "d2t names tokens that the model does not have")


def check_key_sizes(header: Header) -> None:
    is_same = header.own("attention.key_length") == header.own("attention.value_length")
    require(header, is_same, "its keys and values differ in size")
