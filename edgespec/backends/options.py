"""Options of a loaded model that all runtimes have."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import psutil

from edgespec.errors import InvalidRequest
from edgespec.machines.memory import RAM, split_places, split_shares
from edgespec.machines.workers import check_addresses

DEFAULT_CONTEXT = 8192  # tokens; less if the model was trained for less
KvType = Literal["f16", "q8_0", "q4_0"]
STATE_SNAPSHOTS = 8  # recurrent states that llama.cpp keeps, if the architecture can; bounds the draft length
EXACT_WIDTHS = (1, 2, 4, 8)  # rows of a forward, all of which one kernel computes; it may take four at a time


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded and run: options of edgespec/options.py, with these differences and additions.

    batch_threads    of forwards of more than one row; None: as `threads`, or fewer if that was faster
    mlock            keep the model in RAM; on MLX all memory of the GPU up to the size that the system recommends
    caches           conversations whose KV caches are kept, each of the whole context; also the limit of
                     parallel answers
    tree_cache       one cache more, for a text that is alone: there its drafts may be trees
    exact            the text does not depend on what is drafted, at some cost in speed: kernels whose results do not
                     depend on the number of rows if there are some, else forwards of one width
    exact_width      rows of those forwards, 1, 2, 4 or 8; None: the cheapest by measurement. It changes the text
    mtp              load the MTP layers that the model's file has, for a head in it; llama.cpp refuses some files
                     without them
    workers          HOST:PORT of workers that compute a part of the layers, see machines.workers
    trusts_network   whether workers may be on a network, whose machines can then run code on them
    """

    context_size: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    gpu_layers_draft: int | None = None
    n_cpu_moe: int | None = None
    device: tuple[str, ...] | None = None
    tensor_split: str | None = None
    override_tensor: str | None = None
    kv_type: KvType = "f16"
    flash_attention: bool | None = None
    mmap: bool = True
    mlock: bool = False
    caches: int = 1
    tree_cache: bool = False
    exact: bool = False
    exact_width: int | None = None
    batch_threads: int | None = None
    mtp: bool = False
    workers: tuple[str, ...] = ()
    trusts_network: bool = False

    @property
    def alone(self) -> LoadOptions:
        """The same on this machine alone, for models that are small: drafts and heads."""
        of_draft = 0 if self.gpu_layers_draft is None and self.gpu_layers == 0 else self.gpu_layers_draft
        return replace(self, workers=(), gpu_layers=of_draft, n_cpu_moe=None, tensor_split=None, override_tensor=None)

    @property
    def on_host(self) -> bool:
        """Whether no GPU is used. llama.cpp reads prompts on one that it sees, even if that has no layers."""
        return self.gpu_layers == 0 and all(name == RAM for _, name in split_places(self.override_tensor))

    def context_for(self, trained: int | None) -> int:
        """Tokens of context for a model trained on `trained` of them (None: unknown)."""
        return self.context_size or min(trained or DEFAULT_CONTEXT, DEFAULT_CONTEXT)

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("context size", self.context_size, 8, 2**24),
            ("threads", self.threads, 1, 512),
            ("batch threads", self.batch_threads, 1, 512),
            ("GPU layers", self.gpu_layers, 0, 100_000),
            ("GPU layers of a draft", self.gpu_layers_draft, 0, 100_000),
            ("layers with experts in RAM", self.n_cpu_moe, 0, 100_000),
            ("parallel answers", self.caches, 1, 64),
        ):
            if value is not None and not low <= value <= high:
                raise InvalidRequest(
                    f"{name} must be {low} to {high}, not {value}.", hint=f"Choose a number from {low} to {high}."
                )
        if self.exact_width is not None and (not self.exact or self.exact_width not in EXACT_WIDTHS):
            raise InvalidRequest(
                f"the exact width is 1, 2, 4 or 8, with --exact, not {self.exact_width}.",
                hint="Add --exact, or drop the width.",
            )
        if self.kv_type != "f16" and self.flash_attention is False:
            raise InvalidRequest("a quantized cache needs flash attention.", hint="Drop one of the two options.")
        split_shares(self.tensor_split)
        placed = {name for _, name in split_places(self.override_tensor)} - {RAM}
        if self.device is not None and (left := sorted(placed.difference(self.device))):  # llama.cpp ends the process
            raise InvalidRequest(
                f"--override-tensor places tensors on {left[0]}, and --device leaves it out.",
                hint="Add it to --device.",
            )
        if self.workers and (self.tensor_split or self.override_tensor):
            raise InvalidRequest(
                "beside workers, layers are divided by memory alone.", hint="Drop --tensor-split and --override-tensor."
            )
        check_addresses(self.workers, trusts_network=self.trusts_network)


def physical_cores() -> int:
    """Performance cores on Apple Silicon, else physical cores, within the CPU affinity; at least one."""
    cores = psutil.cpu_count(logical=False) or 1
    if sys.platform == "darwin":
        query = subprocess.run(
            ["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True, check=False
        )
        cores = int(query.stdout) if query.stdout.strip().isdigit() else cores
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return max(1, cores)


@cache
def idle_cores() -> int:
    """Physical cores that are idle now, at least one; measured once, for 50 ms.

    With one thread more than idle cores, every decode waits for a time slice: a loss far above that thread's gain.
    """
    busy = psutil.cpu_percent(interval=0.05) / 100 * (psutil.cpu_count() or 1)
    return max(1, physical_cores() - round(busy))
