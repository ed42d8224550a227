"""The ids of a head's reduced vocabulary, which llama.cpp uses as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf import Header, TensorInfo


def check_ids(header: Header, path: Path, d2t: TensorInfo, rows: int, vocab_size: int) -> None:
    """That `d2t` names a token of the target for each of the `rows` of the output matrix. Raises InvalidModelFile."""
    if d2t.type.name != "I64" or d2t.shape != (rows,):
        raise header.invalid(f"d2t does not name a token for each of the {rows} rows of its output matrix")
    try:
        ids = np.fromfile(path, "<i8", rows, offset=header.data_offset + d2t.offset)
    except OSError as error:
        raise InvalidModelFile(f"{path.name} cannot be read: {error}.", hint="Pull it again.") from error
    if len(ids) < rows or ids.min() < 0 or ids.max() >= vocab_size:
        raise header.invalid("d2t names tokens that the model does not have")
