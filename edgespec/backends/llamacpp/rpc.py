"""ggml's RPC: its functions, the server that makes a worker of this process, and the end of a connection.

ggml ends the process if a worker does not answer as expected. Before that it calls `report_end`, which names the
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
from pathlib import Path
from typing import Any

from edgespec.backends.llamacpp.library import ggml, library, rebuild_command
from edgespec.errors import BackendError, BackendUnavailable
from edgespec.sockets import keep_alive

_RESTART = "Start it again there (edgespec worker), with the same version as here, and check the network."
BUILD_SETTING = "-DGGML_RPC=on"
_IDLE_S, _PROBES = 5, 3  # TCP keepalive: seconds without traffic before probes, and probes, one each second
_UNHEARD_MS = 15_000  # milliseconds for which packets may stay unanswered
connected: list[str] = []
"""The workers that this process uses."""


def require_rpc() -> None:
    """Raises BackendUnavailable if this build of llama.cpp has no RPC."""
    if not library().api.llama_supports_rpc():
        raise BackendUnavailable(
            "this build of llama.cpp has no RPC, which workers need.", hint=rebuild_command(BUILD_SETTING)
        )


def serve(host: str, port: int, devices: Sequence[str], threads: int, cache: Path | None) -> None:
    """Lend the devices of these names to one client after the other. Returns only if it could not begin.

    What ggml says goes to standard output. `cache`: an existing folder for weights, so that they are sent once.
    """
    require_rpc()
    library().on_end = report_end
    handles = [ggml().ggml_backend_dev_by_name(name.encode()) for name in devices]
    start = find(
        "ggml_backend_rpc_start_server",
        None,
        [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p],
    )
    folder = os.fsencode(cache) if cache is not None else None
    start(f"{host}:{port}".encode(), folder, threads, len(handles), (ctypes.c_void_p * len(handles))(*handles))


def find(name: str, result: Any, arguments: list[Any]) -> Any:
    reg = ggml().ggml_backend_reg_by_name(b"RPC")
    address = ggml().ggml_backend_reg_get_proc_address(reg, name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def notice_silence(address: tuple[str, int]) -> None:
    """Have the system end connections of an IPv4 address, "" for any, whose machine is gone; else ggml waits."""
    host, port = address
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


def report_end(text: str) -> None:
    """End the process with a sentence on standard error if a worker is lost; else ggml ends it, with its reason."""
    if "RPC" not in text and "Failed to connect" not in text:
        library().report_end(text)
        return
    lost = [address for address in connected if address in text] or connected
    who = "The worker" if len(lost) == 1 else "One of the workers"
    errors = 2
    with suppress(Exception):
        sys.stdout.flush()
        errors = sys.stderr.fileno()  # of a command, where 2 is a file for what ggml says
    os.write(errors, f"\nerror: {who} {', '.join(lost)} does not answer any more.\nhint: {_RESTART}\n".encode())
    os._exit(BackendError.exit_code)
