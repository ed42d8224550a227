"""Settings for MLX on Linux, which has a tenth of the speed there that its CPU would allow."""

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


def hasten_mlx() -> None:
    """For this process and its children, among which are the workers of pytest-xdist; called before MLX is imported.

    Its wheel brings the reference BLAS, of 1e9 products a second: `sgemm.c` goes before it, where there is a compiler.
    `mx.compile` starts a C++ compiler for each new kernel, which takes longer than it saves.
    """
    global _folder
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None or "LD_PRELOAD" in os.environ:
        return
    os.environ["MLX_DISABLE_COMPILE"] = "1"
    _folder = TemporaryDirectory(prefix="edgespec-sgemm-")
    library = Path(_folder.name) / "libsgemm.so"
    flags = ("-O3", "-march=native", "-fopenmp-simd", "-fPIC", "-shared")
    if subprocess.run([compiler, *flags, "-o", library, SOURCE], capture_output=True).returncode == 0:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        os.environ["LD_PRELOAD"] = str(library)
