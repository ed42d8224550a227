"""A fast matrix product for MLX on Linux, whose wheel brings the reference BLAS of 1e9 products a second."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_name("sgemm.c")
_folder: TemporaryDirectory[str] | None = None  # removed when this process ends


def preload_sgemm() -> None:
    """Put `sgemm.c` before MLX's BLAS, here and in child processes. Where it cannot be compiled, tests take longer.

    Called before MLX is imported. Workers of pytest-xdist are children.
    """
    global _folder
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None or "LD_PRELOAD" in os.environ:
        return
    _folder = TemporaryDirectory(prefix="edgespec-sgemm-")
    library = Path(_folder.name) / "libsgemm.so"
    flags = ("-O3", "-march=native", "-fopenmp-simd", "-fPIC", "-shared")
    if subprocess.run([compiler, *flags, "-o", library, SOURCE], capture_output=True).returncode == 0:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        os.environ["LD_PRELOAD"] = str(library)
