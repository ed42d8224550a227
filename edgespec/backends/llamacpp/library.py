"""The native library: lazy import, captured logs, devices and their memory."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgespec.errors import BackendUnavailable, InvalidRequest
from edgespec.installation import find_installer, install_command
from edgespec.machines.memory import RAM

_LOG_INFO, _LOG_ERROR, _LOG_CONT = 2, 4, 5


class NativeLog:
    """Takes llama.cpp's log: keeps the first error, and echoes all lines to stderr while `echo` is set."""

    def __init__(self) -> None:
        self.echo = False
        self._error = ""
        self._level = _LOG_INFO
        self.on_line: Callable[[str], None] | None = None  # called before the library goes on; must not raise

    def write(self, level: int, text: bytes, _user_data: object) -> None:
        line = text.decode("utf-8", "replace")
        if level != _LOG_CONT:
            self._level = level
        if self.echo and sys.stderr is not None:
            sys.stderr.write(line)
        if self.on_line is not None:
            self.on_line(line)
        if self._level == _LOG_ERROR and not self._error:
            self._error = line.strip()

    def clear_error(self) -> None:
        self._error = ""

    def reason(self, otherwise: str = "no reason given") -> str:
        """The first error since `clear_error`, usually the cause of the later ones, without its function name."""
        return self._error.split(": ", 1)[-1].rstrip(".") or otherwise


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device as ggml sees it; memory in bytes."""

    name: str
    description: str
    kind: str  # "cpu", "gpu", "igpu" or "accelerator"
    free: int
    total: int

    @property
    def is_gpu(self) -> bool:
        return self.kind in ("gpu", "igpu")


class Library:
    """The loaded library: `api` is the ctypes module with llama.h's functions, `log` their output.

    `on_end` gets ggml's reason before ggml ends this process.
    """

    def __init__(self, api: Any) -> None:
        self.api = api
        self.log = NativeLog()
        self.on_end: Callable[[str], None] = self.report_end
        self._callback = api.llama_log_callback(self.log.write)  # a reference: the library keeps only the pointer
        api.llama_log_set(self._callback, ctypes.c_void_p(0))
        self._end = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: self.on_end(text.decode("utf-8", "replace")))
        ggml().ggml_set_abort_callback(self._end)
        atexit.register(ggml().ggml_set_abort_callback, None)  # ggml may end the process after Python's end
        api.llama_backend_init()

    def report_end(self, text: str) -> None:
        """Write ggml's reason, and the error that it has logged before, to standard error."""
        os.write(2, (": ".join(filter(None, (text, self.log.reason("")))) + "\n").encode())

    def metadata(self, model: Any, key: bytes) -> bytes:
        """A value of a model's metadata as text; empty if there is none."""
        buffer = ctypes.create_string_buffer(128)
        length = self.api.llama_model_meta_val_str(model, key, buffer, 128)
        return buffer.value if length >= 0 else b""

    def devices(self) -> tuple[Device, ...]:
        """Every device that ggml was built for and finds, with its free memory now."""
        api, kinds, found = ggml(), {0: "cpu", 1: "gpu", 2: "igpu"}, []
        for device in map(api.ggml_backend_dev_get, range(api.ggml_backend_dev_count())):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            api.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            name, description = api.ggml_backend_dev_name(device), api.ggml_backend_dev_description(device)
            kind = kinds.get(api.ggml_backend_dev_type(device), "accelerator")
            found.append(Device(name.decode(), description.decode(), kind, free.value, total.value))
        return tuple(found)

    def find_devices(self, names: Sequence[str] | None = None, *, only_gpus: bool = True) -> tuple[Device, ...]:
        """The GPUs of these names, or all; with `only_gpus` False, other devices too.

        Raises InvalidRequest for a name that none has.
        """
        found = {device.name: device for device in self.devices() if device.is_gpu or not only_gpus}
        for name in names or ():
            if name not in found:
                built = "`edgespec doctor` says what llama.cpp was built for."
                kind = "GPU" if only_gpus else "device"
                raise InvalidRequest(
                    f"llama.cpp finds no {kind} '{name}'.", hint=f"It finds {', '.join(found)}." if found else built
                )
        return tuple(found[name] for name in dict.fromkeys(found if names is None else names))


@cache
def library() -> Library:
    """Import and initialise llama.cpp once. Raises BackendUnavailable if it is not installed or does not load."""
    try:
        import llama_cpp.llama_cpp as api
    except ImportError as error:
        raise BackendUnavailable(
            f"llama.cpp is not installed ({error}).", hint=f"Install it: {install_command('llama-cpp-python')}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise BackendUnavailable(
            f"llama.cpp is installed but does not load: {error}.",
            hint=f"Reinstall it: {rebuild_command()}",
        ) from error
    return Library(api)


def rebuild_command(setting: str = "") -> str:
    """The shell command that builds llama.cpp again with a setting of CMake, by the way edgespec is installed."""
    build = f'CMAKE_ARGS="$CMAKE_ARGS {setting}" ' if setting else ""
    installer, name = find_installer()
    if installer == "pipx":
        return f"{build}pipx runpip {name} install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"
    if installer == "uv tool":
        return f"{build}uv tool upgrade {name} --no-cache --reinstall-package llama-cpp-python"
    if installer == "uv":
        return f"{build}uv pip install --no-cache --reinstall-package llama-cpp-python llama-cpp-python"
    return f"{build}{sys.executable} -m pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"


def list_handles(names: Iterable[str], others: Iterable[int] = ()) -> Any:
    """The devices of llama_model_params, which point to them: `others`, those of these names, and a null pointer."""
    values = (*others, *(ggml().ggml_backend_dev_by_name(name.encode()) for name in names), None)
    return (ctypes.c_void_p * len(values))(*values)


@cache
def ggml() -> Any:
    """ggml's library with the types of the functions that are used here; `library` has loaded it."""
    from llama_cpp._ggml import libggml

    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    size_pointer = ctypes.POINTER(size)
    for name, result, arguments in (
        ("ggml_backend_dev_count", size, []),
        ("ggml_backend_dev_get", pointer, [size]),
        ("ggml_backend_dev_name", text, [pointer]),
        ("ggml_backend_dev_description", text, [pointer]),
        ("ggml_backend_dev_type", ctypes.c_int, [pointer]),
        ("ggml_backend_dev_memory", None, [pointer, size_pointer, size_pointer]),
        ("ggml_backend_reg_by_name", pointer, [text]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, text]),
        ("ggml_backend_reg_dev_count", size, [pointer]),
        ("ggml_backend_reg_dev_get", pointer, [pointer, size]),
        ("ggml_backend_dev_by_name", pointer, [text]),
        ("ggml_backend_dev_buffer_type", pointer, [pointer]),
        ("ggml_backend_dev_init", pointer, [pointer, text]),
        ("ggml_backend_free", None, [pointer]),
        ("ggml_backend_cpu_buffer_type", pointer, []),
        ("ggml_quantize_chunk", size, [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]),
    ):
        function = getattr(libggml, name)
        function.restype, function.argtypes = result, arguments
    return libggml


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def place_tensors(params: Any, places: Sequence[tuple[str, str]]) -> None:
    """Have llama_model_params place tensors by (regular expression for names, RAM or a device), the first that fits.

    Earlier calls come first.
    """
    api = ggml()
    params.places = [*getattr(params, "places", ()), *places]
    overrides = (_Override * (len(params.places) + 1))()
    for override, (pattern, name) in zip(overrides, params.places, strict=False):
        override.pattern = pattern.encode()
        device = None if name == RAM else api.ggml_backend_dev_by_name(name.encode())
        override.buft = api.ggml_backend_dev_buffer_type(device) if device else api.ggml_backend_cpu_buffer_type()
    params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    params.overrides = overrides  # lives as long as what points to it
