"""Memory and time that the workers of a model add."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgespec.backends import FileBackend
from edgespec.backends.llamacpp.split import Split, split_layers
from edgespec.backends.options import LoadOptions
from edgespec.errors import InvalidRequest
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.machines.memory import DeviceMemory, Memory
from edgespec.machines.workers import Worker, find_workers

PROCESS_BYTES = 128 * 2**20
"""What the interpreter and a runtime take beside a model: 75 MiB with llama.cpp, 110 with MLX."""

_FLOAT = 4  # bytes of a number between layers


@dataclass(frozen=True, slots=True)
class Network:
    """Workers that have answered, and what they compute.

    Every device with layers adds a round trip to a forward, whatever the number of its rows: llama.cpp sends the rows
    and the graph without a wait, and asks for the result.
    """

    workers: tuple[Worker, ...]
    split: Split
    row_bytes: int

    @property
    def wait_s(self) -> float:
        """Seconds that the round trips add to a forward."""
        used = zip(self.workers, self.split.workers, strict=True)
        return sum(worker.round_trip_s * sum(n > 0 for n in counts) for worker, counts in used)

    def describe(self) -> str:
        return f"{self.split.describe(self.workers)}; the network adds {self.wait_s * 1e3:.2g} ms to a forward."

    def to_dict(self) -> dict[str, Any]:
        """Returns what `edgespec plan --json` states."""
        return {
            "layers_here": self.split.here,
            "workers": [
                {
                    "address": worker.address,
                    "layers": layers,
                    "free_bytes": worker.free,
                    "is_this_machine": worker.is_here,
                    "round_trip_ms": round(worker.round_trip_s * 1e3, 3),
                }
                for worker, layers in zip(self.workers, self.split.remote, strict=True)
            ],
            "network_ms": round(self.wait_s * 1e3, 3),
            "network_bytes_per_row": self.row_bytes,
        }


def find_network(
    options: LoadOptions, backend: FileBackend, target: ModelMetadata, memory: Memory, known: Network | None = None
) -> tuple[Network | None, Memory]:
    """The workers of `options`, and `memory` with theirs; those of `known` are not asked again.

    Raises InvalidRequest, BackendError.
    """
    if not options.workers:
        return None, memory
    if backend != "llamacpp" or not isinstance(target, Header):
        raise InvalidRequest(
            "workers compute with llama.cpp, not MLX.", hint="Drop --workers, or add --backend llamacpp."
        )
    workers = known.workers if known is not None else find_workers(options.workers)
    split = split_layers(target.own("block_count") or 0, workers, memory, options.gpu_layers)
    row_bytes = split.hops * 2 * _FLOAT * (target.own("embedding_length") or 0)
    lent = (
        DeviceMemory(worker.address, free, total, shares_ram=worker.is_here)
        for worker in workers
        for free, total in worker.devices
    )
    return known or Network(workers, split, row_bytes), replace(memory, devices=(*memory.devices, *lent), limit=None)
