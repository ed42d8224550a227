"""ggml's RPC: its functions, the server that makes a worker of this process, and the end of a connection.

ggml ends the process where a worker does not answer as expected. Before that it calls `_report_end`, which names the
worker in one sentence on standard error.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.backends.llamacpp.library import library
from edgespec.errors import BackendError, BackendUnavailable
from edgespec.sockets import keep_alive

_RESTART = "Start it again there (edgespec worker), with the same version as here, and check the network."
BUILD_SETTING = "-DGGML_RPC=on"
_IDLE_S, _PROBES = 5, 3  # of a connection, after which packets ask whether the other side lives, one each second
_UNHEARD_MS = 15_000  # for which packets may stay unanswered
connected: dict[str, list[int]] = {}
"""The workers that this process uses, with the descriptors of ggml's connections."""


def has_rpc() -> bool:
    """Whether this build of llama.cpp can use workers and be one. Raises BackendUnavailable."""
    return bool(library().api.llama_supports_rpc())


def require_rpc() -> None:
    """Raises BackendUnavailable where this build of llama.cpp has no RPC."""
    if not has_rpc():
        raise BackendUnavailable(
            "this build of llama.cpp has no RPC, which workers need.", hint=rebuild_command(BUILD_SETTING)
        )


def rebuild_command(setting: str) -> str:
    """The shell command that builds llama.cpp again with a setting of CMake, by the way edgespec is installed."""
    build = f'CMAKE_ARGS="$CMAKE_ARGS {setting}"'
    prefix = Path(sys.prefix)
    if prefix.parent.name == "venvs" and prefix.parent.parent.name == "pipx":
        return f"{build} pipx runpip {prefix.name} install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"
    if (prefix / "uv-receipt.toml").exists():
        return f"{build} uv tool upgrade {prefix.name} --no-cache --reinstall-package llama-cpp-python"
    with suppress(OSError):
        if "\nuv = " in "\n" + (prefix / "pyvenv.cfg").read_text(encoding="utf-8"):
            return f"{build} uv pip install --no-cache --reinstall-package llama-cpp-python llama-cpp-python"
    return f"{build} {sys.executable} -m pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"


def serve(host: str, port: int, devices: Sequence[str], threads: int, cache: Path | None) -> None:
    """Lend the devices of these names to one client after the other. Returns only where it could not begin.

    What ggml says goes to standard output. `cache`: an existing folder for weights, so that they are sent once.
    """
    require_rpc()
    watch_end()
    handles = [ggml().ggml_backend_dev_by_name(name.encode()) for name in devices]
    start = find(
        "ggml_backend_rpc_start_server",
        None,
        [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p],
    )
    folder = os.fsencode(cache) if cache is not None else None
    start(f"{host}:{port}".encode(), folder, threads, len(handles), (ctypes.c_void_p * len(handles))(*handles))


@cache
def ggml() -> Any:
    """The library with the types of the functions that are used here."""
    from llama_cpp._ggml import libggml

    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("ggml_backend_reg_by_name", pointer, [ctypes.c_char_p]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_reg_dev_count", ctypes.c_size_t, [pointer]),
        ("ggml_backend_reg_dev_get", pointer, [pointer, ctypes.c_size_t]),
        ("ggml_backend_dev_by_name", pointer, [ctypes.c_char_p]),
        ("ggml_backend_dev_init", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_free", None, [pointer]),
        ("ggml_backend_cpu_buffer_type", pointer, []),
    ):
        function = getattr(libggml, name)
        function.restype, function.argtypes = result, arguments
    return libggml


def find(name: str, result: Any, arguments: list[Any]) -> Any:
    """A function of the RPC backend."""
    reg = ggml().ggml_backend_reg_by_name(b"RPC")
    address = ggml().ggml_backend_reg_get_proc_address(reg, name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def notice_silence(address: tuple[str, int]) -> list[int]:
    """Have the system end connections from or to `address` whose other machine is gone; else ggml would wait forever.

    `address` is an IPv4 address, which may be empty for any, and a port. Returns their descriptors, which are ggml's.
    """
    host, port = address
    found = []
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                ends = connection.getsockname(), connection.getpeername()
                is_tcp = connection.family == socket.AF_INET
                if is_tcp and any(end[1] == port and host in ("", end[0]) for end in ends):
                    keep_alive(connection, idle_s=_IDLE_S, interval_s=1, probes=_PROBES)
                    if hasattr(socket, "TCP_USER_TIMEOUT"):
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
                    found.append(descriptor)
    return found


@cache
def watch_end() -> Any:
    """Have ggml call `_report_end` before it ends this process. The result must stay alive."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_report_end)
    ggml().ggml_set_abort_callback(callback)
    return callback


def _report_end(message: bytes) -> None:
    """End the process with a sentence on standard error where a worker is lost; else ggml ends it, with its reason."""
    text = message.decode("utf-8", "replace")
    if "RPC" not in text and "Failed to connect" not in text:
        os.write(2, f"{text}\n".encode())
        return
    lost = [address for address, each in connected.items() if address in text or any(map(_is_lost, each))]
    lost = lost or list(connected)
    who = f"the worker {lost[0]}" if len(lost) == 1 else f"one of the workers {', '.join(lost)}"
    with suppress(Exception):
        sys.stdout.flush()
    os.write(2, f"\nerror: {who[0].upper()}{who[1:]} does not answer any more.\nhint: {_RESTART}\n".encode())
    os._exit(BackendError.exit_code)


def _is_lost(descriptor: int) -> bool:
    """Whether a connection has ended; its socket is still open."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
