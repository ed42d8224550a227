"""Quantized copies of GGUF files, and of single matrices as llama.cpp makes them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.backends.llamacpp.library import ggml, library
from edgespec.backends.options import idle_cores
from edgespec.errors import BackendError, CacheError
from edgespec.files import replace_file
from edgespec.formats.ggml_types import GGML_IDS, GgmlType
from edgespec.formats.gguf import TensorInfo
from edgespec.formats.gguf_validate import read_file

FTYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
_BLOCK = 32  # weights of a block, of the types with the smallest ones


def quantize(source: Path, destination: Path, ftype: str) -> None:
    """Quantize every matrix of `source`, output and embeddings included, to `ftype` (a key of FTYPES).

    The destination appears only when it is complete. Raises CacheError, BackendError, InvalidModelFile.
    """
    lib = library()
    params = lib.api.llama_model_quantize_default_params()
    kept = [tensor for tensor in read_file(source).tensors if _must_keep_type(tensor)]
    places = [(f"^{re.escape(tensor.name)}$".encode(), GGML_IDS[tensor.type.name]) for tensor in kept]
    params.tt_overrides = (lib.api.llama_model_tensor_override * (len(places) + 1))(*places)  # the last one is empty
    params.ftype = FTYPES[ftype]
    params.nthread = idle_cores()
    params.allow_requantize = True
    params.pure = ftype in ("F16", "Q4_0", "Q8_0")
    try:
        with replace_file(destination) as partial:
            lib.log.clear_error()
            if lib.api.llama_model_quantize(os.fsencode(source), os.fsencode(partial), params) != 0:
                raise BackendError(
                    f"llama.cpp could not quantize {source.name} to {ftype}: {lib.log.reason()}.",
                    hint="Check that the file is a complete GGUF model and that the disk has room.",
                )
    except OSError as error:
        raise CacheError(
            f"cannot write to {destination.parent}: {error.strerror}.", hint="Choose another folder."
        ) from error


def _must_keep_type(tensor: TensorInfo) -> bool:
    """Whether a forward aborts on other types of `tensor`: norms are multiplied by element, and so are convolutions.

    By itself llama.cpp leaves out only those that it knows by name. It converts rows that are no whole blocks to floats
    of 16 bits.
    """
    return "norm" in tensor.name or tensor.shape[0] % _BLOCK != 0


def quantize_rows(rows: npt.NDArray[np.float32], kind: GgmlType) -> npt.NDArray[np.uint8]:
    """Rows [n, items] in a quantized type, as bytes [n, bytes of a row]. Raises BackendUnavailable.

    The type must be one that needs no importance matrix, and `items` a whole number of its blocks.
    """
    library()  # loads ggml
    rows = np.ascontiguousarray(rows, np.float32)
    n, items = rows.shape
    packed = np.empty((n, kind.nbytes(items)), np.uint8)
    ggml().ggml_quantize_chunk(GGML_IDS[kind.name], rows.ctypes.data, packed.ctypes.data, 0, n, items, None)
    return packed
