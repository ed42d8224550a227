"""What a model's workers add: memory, the split of its layers, and the network's part of a forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.backends import FileBackend
from edgespec.backends.devices import DeviceMemory, Memory
from edgespec.backends.llamacpp.split import Split, split_layers
from edgespec.backends.options import LoadOptions
from edgespec.backends.workers import Worker, find_workers
from edgespec.errors import DoesNotFit, DraftRefused, InvalidRequest
from edgespec.formats.gguf import Header
from edgespec.formats.metadata import ModelMetadata
from edgespec.planner.draft_finder import PlannedDrafter
from edgespec.planner.memory import Fit
from edgespec.units import gib

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
        """One sentence for a load."""
        return f"{self.split.describe(self.workers)}; the network adds {self.wait_s * 1e3:.2g} ms to a forward."

    def to_dict(self) -> dict[str, Any]:
        """For `edgespec plan --json`."""
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
    return known or Network(workers, split, row_bytes), replace(memory, devices=(*memory.devices, *lent))


def check_drafts(fit: Fit, own: Memory) -> None:
    """Raises DoesNotFit where the drafts are larger than `own`, the memory of this machine, which computes them."""
    if fit.draft is not None and fit.draft.total > own.usable:
        raise DoesNotFit(
            f"the drafts need {gib(fit.draft.total)} on this machine, and {gib(own.usable)} are free.",
            hint="Use --draft ngram.",
        )


def keep_local(
    drafters: Sequence[PlannedDrafter], network: Network | None, *, leave_out: bool
) -> tuple[list[PlannedDrafter], Iterable[str]]:
    """The drafters that can work beside workers, and a sentence for each that is left out; else raises DraftRefused."""
    told: list[str] = []
    kept = list(drafters)
    for each in drafters if network is not None else ():
        if each.head is not None and each.head.kind == "gemma4-assistant":
            reason = f"{each.label} reads the target's cache, a part of which is on workers"
            if not leave_out:
                raise DraftRefused(f"{reason}.", hint="Use --draft auto or ngram.")
            told.append(f"Drafting without {each.label}: {reason}.")
            kept.remove(each)
    return kept, told
