"""Divides the layers of a model between this machine and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from edgespec.errors import InvalidRequest
from edgespec.machines.memory import RESERVE_BYTES, Memory
from edgespec.machines.workers import Worker


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
        """The layers of each machine in words, such as '4 layers here, 12 on 10.0.0.2:50052'."""
        parts = [f"{self.here} layer{'s' * (self.here != 1)} here"]
        parts += [f"{n} on {each.address}" for n, each in zip(self.remote, workers, strict=True)]
        return ", ".join(parts)


def split_layers(count: int, workers: Sequence[Worker], memory: Memory, gpu_layers: int | None) -> Split:
    """Divide `count` layers among the workers' devices and this machine, in proportion to free memory.

    Each device gets one as long as there are any.

    This machine takes part with its accelerators, or with its processor if it has none. `gpu_layers`: that many are
    not on its processor. Raises InvalidRequest if the workers would have none.
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
        # A part without any, or else the one with the largest size for each thing, one more included
        chosen = max(range(len(sizes)), key=lambda i: (not counts[i], sizes[i] / (counts[i] + 1), -counts[i]))
        counts[chosen] += 1
    return counts
