"""ggml's RPC: its functions, the server that makes a worker of this process, and the end of a connection.

ggml ends the process where a worker does not answer as expected. Before that it calls `_report_end`, which names the
worker in one sentence on standard error.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from edgespec.backends import device_memory
from edgespec.backends.devices import RAM, RESERVE_BYTES, Memory, host_memory
from edgespec.backends.llamacpp.library import ggml, library, list_handles, place_tensors, rebuild_command
from edgespec.backends.options import LoadOptions
from edgespec.backends.workers import Worker, find_workers, resolve
from edgespec.errors import BackendError, BackendUnavailable, InvalidRequest
from edgespec.files import stat_files
from edgespec.formats.gguf_validate import read_file
from edgespec.sockets import keep_alive

_RESTART = "Start it again there (edgespec worker), with the same version as here, and check the network."
BUILD_SETTING = "-DGGML_RPC=on"
_IDLE_S, _PROBES = 5, 3  # of a connection, after which packets ask whether the other side lives, one each second
_UNHEARD_MS = 15_000  # for which packets may stay unanswered
connected: list[str] = []
"""The workers that this process uses."""


def require_rpc() -> None:
    """Raises BackendUnavailable where this build of llama.cpp has no RPC."""
    if not library().api.llama_supports_rpc():
        raise BackendUnavailable(
            "this build of llama.cpp has no RPC, which workers need.", hint=rebuild_command(BUILD_SETTING)
        )


def serve(host: str, port: int, devices: Sequence[str], threads: int, cache: Path | None) -> None:
    """Lend the devices of these names to one client after the other. Returns only where it could not begin.

    What ggml says goes to standard output. `cache`: an existing folder for weights, so that they are sent once.
    """
    require_rpc()
    library().on_end = _report_end
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


def _report_end(text: str) -> None:
    """End the process with a sentence on standard error where a worker is lost; else ggml ends it, with its reason."""
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


# Which layers of a model this machine computes, and which its workers do.


@dataclass(frozen=True, slots=True)
class Split:
    """Layers in the order of a forward, and who computes them.

    cpu      layers on this machine's processor, the first ones
    workers  then those of each device of each worker
    gpus     then those of each accelerator of this machine
    """

    cpu: int
    workers: tuple[tuple[int, ...], ...]
    gpus: tuple[int, ...]

    @property
    def here(self) -> int:
        """Layers on this machine."""
        return self.cpu + sum(self.gpus)

    @property
    def remote(self) -> tuple[int, ...]:
        """Layers on each worker."""
        return tuple(map(sum, self.workers))

    @property
    def share(self) -> float:
        """This machine's share of the layers."""
        return self.here / max(1, self.here + sum(self.remote))

    @property
    def hops(self) -> int:
        """Devices of workers that have layers: each adds a round trip to a forward."""
        return sum(count > 0 for counts in self.workers for count in counts)

    def describe(self, workers: Sequence[Worker]) -> str:
        """Such as '4 layers here, 12 on 10.0.0.2:50052'."""
        parts = [f"{self.here} layer{'s' * (self.here != 1)} here"]
        parts += [f"{n} on {each.address}" for n, each in zip(self.remote, workers, strict=True)]
        return ", ".join(parts)


def split_layers(count: int, workers: Sequence[Worker], memory: Memory, gpu_layers: int | None) -> Split:
    """Split `count` layers in proportion to free memory, this machine's among it; each part gets one if there are any.

    This machine takes part with its accelerators, or with its processor where it has none. `gpu_layers`: that many are
    not on its processor. Raises InvalidRequest where the workers would have none.
    """
    devices = [free for worker in workers for free, _ in worker.devices]
    gpus = [gpu.free for gpu in memory.layer_devices]
    if gpu_layers == 0:
        raise InvalidRequest(
            "with --gpu-layers 0 the workers compute no layers.", hint="Drop --gpu-layers, or --workers."
        )
    parts = [max(0, size - RESERVE_BYTES) for size in (*devices, *gpus)]
    if gpus or gpu_layers is not None:
        elsewhere = min(count, gpu_layers or count)
        counts = divide(elsewhere, parts)
    else:
        own, *counts = divide(count, [memory.usable, *parts])
        elsewhere = count - own
    rest = iter(counts)
    by_worker = tuple(tuple(islice(rest, len(worker.devices))) for worker in workers)
    return Split(count - elsewhere, by_worker, tuple(rest))


def divide(count: int, sizes: Sequence[int]) -> list[int]:
    """`count` things in proportion to `sizes`; every part gets one as long as there are any."""
    counts = [0] * len(sizes)
    for _ in range(count):
        # The part without any, or else that with the most room for one more
        chosen = max(range(len(sizes)), key=lambda i: (not counts[i], sizes[i] / (counts[i] + 1), -counts[i]))
        counts[chosen] += 1
    return counts


# The RPC devices of workers, and a model whose layers are divided between this machine and them.


_MAX_SPLITS = 16  # llama_max_devices()
_MAX_DEVICES = 14  # beside the processor, and perhaps its library of matrix products; GGML_SCHED_MAX_BACKENDS is 16


class RemoteDevices:
    """The devices of workers, in their order, each worker connected until `close`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Raises BackendUnavailable, BackendError, InvalidRequest."""
        require_rpc()
        self.workers: tuple[Worker, ...] = find_workers(addresses)
        self._handles: list[int] = []
        self._backends: list[int] = []
        self._kept: list[Any] = []  # what llama.cpp points to while it loads
        library().on_end = _report_end
        endpoints = [resolve(address) for address in addresses]
        add_server = find("ggml_backend_rpc_add_server", ctypes.c_void_p, [ctypes.c_char_p])
        api = ggml()
        connected.extend(addresses)
        for address, endpoint in zip(addresses, endpoints, strict=True):
            reg = add_server(address.encode())
            if not reg:
                self.close()
                raise BackendError(f"the worker {address} lends no device.", hint="Start it again.")
            devices = [api.ggml_backend_reg_dev_get(reg, i) for i in range(api.ggml_backend_reg_dev_count(reg))]
            self._handles += devices
            self._backends.append(api.ggml_backend_dev_init(devices[0], None))  # all uses share its connection
            notice_silence(endpoint)

    def place(self, params: Any, path: Path, options: LoadOptions) -> None:
        """Divide the layers of the model at `path`, and write that into llama_model_params. Raises InvalidRequest.

        The output layer stays on this machine, since a row of scores is many times as large as one between layers.
        """
        memory = host_memory(device_memory("llamacpp", options.device))
        gpus = memory.layer_devices
        if len(self._handles) + len(gpus) > _MAX_DEVICES:
            raise InvalidRequest(
                f"{len(self._handles)} devices of workers and {len(gpus)} of this machine are too many.",
                hint="Start workers with fewer: edgespec worker --device NAME.",
            )
        split = split_layers(read_file(path).own("block_count") or 0, self.workers, memory, options.gpu_layers)
        counts = [*(n for worker in split.workers for n in worker), *split.gpus]
        handles = list_handles((gpu.name for gpu in gpus), self._handles)
        params.n_gpu_layers = sum(counts) + 1  # llama.cpp counts the output layer too, with those of the last device
        counts[-1] += 1
        shares = (ctypes.c_float * _MAX_SPLITS)(*counts)
        params.devices, params.tensor_split = ctypes.cast(handles, ctypes.c_void_p), shares
        self._kept = [handles, shares]
        if not gpus:
            place_tensors(params, [("^(output|token_embd)", RAM)])

    def close(self) -> None:
        """Leave the workers. What uses their devices is freed before."""
        for backend in self._backends:
            ggml().ggml_backend_free(backend)
        self._backends.clear()
        for worker in self.workers:
            connected.remove(worker.address)


# The folder in which a worker keeps weights that it was sent, so that they are sent once.


_MARK = ".client"
_SPARE_BYTES = 256 * 2**20  # of the disk; with less, a file may have been cut off


class WeightsCache:
    """Files written by llama.cpp, which takes them later without a check.

    So the files of a client are removed where its connection did not end in order, or the disk was full: the last of
    them may be incomplete. A mark in the folder tells from when on.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder, or clean it after a worker that was killed. Raises OSError."""
        self.folder = folder
        self._mark = folder / _MARK
        folder.mkdir(parents=True, exist_ok=True)
        if self._mark.exists():
            self._drop_new()

    @property
    def size(self) -> int:
        return sum(found.st_size for found in stat_files(self.folder.iterdir()).values())

    def begin(self) -> None:
        """A client has come. Raises OSError."""
        self._mark.touch()

    def end(self) -> None:
        """The client has gone, and llama.cpp writes nothing more for it."""
        if shutil.disk_usage(self.folder).free < _SPARE_BYTES:
            self._drop_new()
        self._mark.unlink(missing_ok=True)

    def _drop_new(self) -> None:
        """Remove the files since the mark, and the mark."""
        since = self._mark.stat().st_mtime_ns
        for path, found in stat_files(self.folder.iterdir()).items():
            if found.st_mtime_ns >= since:
                with suppress(OSError):
                    path.unlink()
