"""Finds out whether llama.cpp's AMX kernels run on this machine.

GCC 12 and others compile the setup of the tiles wrongly: the first product of a quantized matrix ends the process. So
on a processor with AMX a small model answers in a process of its own first, once for each build of the library.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from edgespec.files import replace_file
from edgespec.folders import cache_folder
from edgespec.isolated import ChildDied, run_in_child

SWITCH = "EDGESPEC_AMX"
"""The variable that tells processes which this one starts: 1 to use the kernels, 0 not to."""

_MODEL = Path(__file__).parents[2] / "assets" / "python-6m" / "target.gguf"


@cache
def amx_is_sound() -> bool:
    """Whether the kernels run; True on a processor without AMX, where they are not used."""
    if not _has_amx():
        return True
    if SWITCH not in os.environ:
        os.environ[SWITCH] = "1" if _look_up() else "0"
    return os.environ[SWITCH] != "0"


def _has_amx() -> bool:
    with suppress(OSError):
        return "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return False


def _look_up() -> bool:
    """What was found for this build of the library, or is found now."""
    note = _note_path()
    with suppress(OSError):
        return note.read_text() == "1"
    try:
        is_sound = run_in_child(_use_tiles)
    except (ChildDied, ImportError):
        is_sound = False
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(note) as partial:
            partial.write_text("1" if is_sound else "0")
    return is_sound


def _note_path() -> Path:
    """The file that remembers the answer, named after the library's build."""
    spec = find_spec("llama_cpp")
    library = Path(spec.origin or "").parent / "lib" / "libggml-cpu.so" if spec is not None else Path()
    built = library.stat().st_mtime_ns if library.is_file() else 0
    return cache_folder() / "calibration" / f"amx-{built:x}"


def _use_tiles() -> bool:
    """Read a token with a quantized model, which ends the process if the kernels do not run."""
    import llama_cpp

    model = llama_cpp.Llama(str(_MODEL), n_ctx=32, n_threads=1, n_threads_batch=1, verbose=False)
    model.eval([1, 2, 3])
    return True
