"""The RPC devices of workers, among which the layers of a model are divided."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.backends import device_memory
from edgespec.backends.llamacpp.library import ggml, library, list_handles, place_tensors
from edgespec.backends.llamacpp.rpc import connected, find, notice_silence, report_end, require_rpc
from edgespec.backends.llamacpp.split import split_layers
from edgespec.backends.options import LoadOptions
from edgespec.errors import BackendError, InvalidRequest
from edgespec.formats.gguf_validate import read_file
from edgespec.machines.memory import RAM, host_memory
from edgespec.machines.workers import Worker, find_workers, resolve

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
        library().on_end = report_end
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
