"""The RPC devices of workers, and a model whose layers are divided between this machine and them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.backends import device_memory
from edgespec.backends.devices import Memory, host_memory
from edgespec.backends.llamacpp.rpc import connected, find, ggml, notice_silence, require_rpc, watch_end
from edgespec.backends.llamacpp.split import Split, split_layers
from edgespec.backends.options import LoadOptions
from edgespec.backends.workers import Worker, find_workers, resolve
from edgespec.errors import BackendError, InvalidRequest
from edgespec.formats.gguf_validate import read_file

_MAX_SPLITS = 16  # llama_max_devices()
_MAX_DEVICES = 14  # beside the processor, and perhaps its library of matrix products; GGML_SCHED_MAX_BACKENDS is 16


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class RemoteDevices:
    """The devices of workers, in their order, each worker connected until `close`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Raises BackendUnavailable, BackendError, InvalidRequest."""
        require_rpc()
        self.workers: tuple[Worker, ...] = find_workers(addresses)
        self._handles: list[int] = []
        self._backends: list[int] = []
        self._kept: list[Any] = []  # what llama.cpp points to while it loads
        watch_end()
        connected.update((address, []) for address in addresses)
        add_server = find("ggml_backend_rpc_add_server", ctypes.c_void_p, [ctypes.c_char_p])
        api = ggml()
        for address in addresses:
            reg = add_server(address.encode())
            if not reg:
                self.close()
                raise BackendError(f"the worker {address} lends no device.", hint="Start it again.")
            devices = [api.ggml_backend_reg_dev_get(reg, i) for i in range(api.ggml_backend_reg_dev_count(reg))]
            self._handles += devices
            self._backends.append(api.ggml_backend_dev_init(devices[0], None))  # all uses share its connection
            connected[address] = notice_silence(resolve(address))

    def place(self, params: Any, layers: int, memory: Memory, gpu_layers: int | None) -> Split:
        """Divide the layers, write that into llama_model_params, and return it. Raises InvalidRequest.

        The output layer stays on this machine, since a row of scores is many times as large as one between layers.
        """
        if len(self._handles) + len(memory.devices) > _MAX_DEVICES:
            raise InvalidRequest(
                f"{len(self._handles)} devices of workers and {len(memory.devices)} of this machine are too many.",
                hint="Start workers with fewer: edgespec worker --device NAME.",
            )
        split = split_layers(layers, self.workers, memory, gpu_layers)
        api = ggml()
        own = [api.ggml_backend_dev_by_name(gpu.name.encode()) for gpu in memory.devices]
        counts = [*(n for worker in split.workers for n in worker), *split.gpus]
        handles = (ctypes.c_void_p * (len(counts) + 1))(*self._handles, *own, None)
        params.n_gpu_layers = sum(counts) + 1  # llama.cpp counts the output layer too, with those of the last device
        counts[-1] += 1
        shares = (ctypes.c_float * _MAX_SPLITS)(*counts)
        params.devices, params.tensor_split = ctypes.cast(handles, ctypes.c_void_p), shares
        self._kept = [handles, shares]
        if not own:
            overrides = (_Override * 2)(_Override(rb"^(output|token_embd)", api.ggml_backend_cpu_buffer_type()))
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
            self._kept.append(overrides)
        return split

    def close(self) -> None:
        """Leave the workers. What uses their devices is freed before."""
        for backend in self._backends:
            ggml().ggml_backend_free(backend)
        self._backends.clear()
        for worker in self.workers:
            connected.pop(worker.address, None)


def connect(params: Any, path: Path, options: LoadOptions) -> RemoteDevices | None:
    """The workers of `options`, with a part of the model at `path` placed on them in llama_model_params.

    None without workers. Raises BackendUnavailable, BackendError, InvalidRequest.
    """
    if not options.workers:
        return None
    layers = read_file(path).own("block_count") or 0
    remote = RemoteDevices(options.workers)
    try:
        remote.place(params, layers, host_memory(device_memory("llamacpp")), options.gpu_layers)
    except BaseException:
        remote.close()
        raise
    return remote
