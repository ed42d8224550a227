"""Write a quantized copy of a GGUF file, and quantize single matrices as llama.cpp does."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.backends.llamacpp.library import library
from edgespec.errors import BackendError, CacheError, InvalidRequest
from edgespec.files import replace_file
from edgespec.formats.ggml_types import GGML_IDS, GgmlType

FTYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}


def quantize(source: Path, destination: Path, ftype: str, *, threads: int = 1) -> None:
    """Quantize every matrix of `source`, output and embeddings included, to `ftype` (a key of FTYPES).

    The destination appears only when it is complete. Raises InvalidRequest, CacheError, BackendError.
    """
    if ftype not in FTYPES:
        raise InvalidRequest(f"there is no quantization '{ftype}' here.", hint=f"Use one of {', '.join(FTYPES)}.")
    lib = library()
    params = lib.api.llama_model_quantize_default_params()
    params.ftype = FTYPES[ftype]
    params.nthread = threads
    params.allow_requantize = True
    params.pure = ftype in ("F16", "Q4_0", "Q8_0")
    try:
        with replace_file(destination) as partial:
            lib.log.clear_errors()
            if lib.api.llama_model_quantize(os.fsencode(source), os.fsencode(partial), params) != 0:
                raise BackendError(
                    f"llama.cpp could not quantize {source.name} to {ftype}: {lib.log.reason()}.",
                    hint="Check that the file is a complete GGUF model and that the disk has room.",
                )
    except OSError as error:
        raise CacheError(
            f"cannot write to {destination.parent}: {error.strerror}.", hint="Choose another folder."
        ) from error


def quantize_rows(rows: npt.NDArray[np.float32], kind: GgmlType) -> npt.NDArray[np.uint8]:
    """Rows [n, items] in a quantized type, as bytes [n, bytes of a row]. Raises BackendUnavailable.

    The type must be one that needs no importance matrix, and `items` a whole number of its blocks.
    """
    library()  # loads ggml
    from llama_cpp._ggml import libggml

    rows = np.ascontiguousarray(rows, np.float32)
    n, items = rows.shape
    packed = np.empty((n, kind.nbytes(items)), np.uint8)
    function = libggml.ggml_quantize_chunk
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    function.restype = ctypes.c_size_t
    function(GGML_IDS[kind.name], rows.ctypes.data, packed.ctypes.data, 0, n, items, None)
    return packed
