"""Write a quantized copy of a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

from edgespec.backends.llamacpp.library import library
from edgespec.errors import BackendError, CacheError, InvalidRequest
from edgespec.files import replace_file

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
