"""Memory of this machine and of its accelerators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from edgespec.errors import InvalidRequest

# Left to the operating system and other programs, in RAM and on each device.
RESERVE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One accelerator; sizes in bytes.

    shares_ram  it has no memory of its own (Apple Silicon, integrated GPUs)
    holds_all   the runtime computes on it alone, so weights and caches have to fit into `total`
    """

    name: str
    free: int
    total: int
    shares_ram: bool = False
    holds_all: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Free memory in bytes: RAM available without swapping, and the accelerators.

    limit    the most that weights and caches may take of both; None: what is free
    process  bytes of the user's limit for the process itself; `limit` is what they leave
    """

    ram_available: int
    devices: tuple[DeviceMemory, ...] = ()
    limit: int | None = None
    process: int = 0

    @property
    def own_devices(self) -> tuple[DeviceMemory, ...]:
        """Devices that have memory of their own."""
        return tuple(device for device in self.devices if not device.shares_ram)

    @property
    def own_device_bytes(self) -> int:
        """Free bytes on devices that have memory of their own, less the reserve on each."""
        return sum(max(0, device.free - RESERVE_BYTES) for device in self.own_devices)

    @property
    def layer_devices(self) -> tuple[DeviceMemory, ...]:
        """The devices that llama.cpp gives layers: those with memory of their own, or the others if there are none."""
        return self.own_devices or self.devices

    @property
    def usable(self) -> int:
        """Bytes that weights and caches may take, RAM and devices together."""
        ram = max(0, self.ram_available - RESERVE_BYTES)
        limits = [device.total for device in self.devices if device.holds_all]
        free = min(ram, *limits) if limits else ram + self.own_device_bytes
        return free if self.limit is None else min(free, self.limit)


def split_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """The devices of an option, "NAME,..." or a sequence. Raises InvalidRequest if there are none."""
    parts = [part.strip() for part in (names.split(",") if isinstance(names, str) else names)]
    if not parts or not all(parts):
        raise InvalidRequest("a device has no name.", hint="Name devices as `edgespec doctor` does: CUDA0,CUDA1.")
    return tuple(parts)


def split_shares(text: str | None, n_gpus: int | None = None) -> tuple[float, ...]:
    """The shares of devices in an option, "N,...". Raises InvalidRequest, also for more shares than `n_gpus`."""
    shares: tuple[float, ...] = ()
    with suppress(ValueError):
        shares = tuple(float(part) for part in text.split(",")) if text is not None else ()
    if text is not None and not (all(0 <= share < 1e9 for share in shares) and any(shares)):
        raise InvalidRequest(f"'{text}' are no shares of GPUs.", hint="Give a number for each, such as 3,1.")
    if n_gpus is not None and len(shares) > n_gpus:
        raise InvalidRequest(
            f"--tensor-split has {len(shares)} shares, and there are {n_gpus} GPUs.",
            hint="Give one for each; `edgespec doctor` lists them.",
        )
    return shares


RAM = "CPU"
"""Stands for a device where tensors are placed."""


def split_places(text: str | None) -> tuple[tuple[str, str], ...]:
    """(regular expression, buffer) of an option, "PATTERN=BUFFER,...". Raises InvalidRequest.

    llama.cpp has the expressions of ECMAScript. A comma that no buffer precedes belongs to an expression.
    """
    hint = r"Give PATTERN=BUFFER, such as 'blk\.1\d\.ffn_.*_exps=CPU'."
    *parts, rest = re.split(r"=([A-Za-z]\w*)(?:,|$)", text or "")
    places = [*zip(parts[::2], parts[1::2], strict=True)]
    if rest or not all(pattern for pattern, _ in places):
        raise InvalidRequest(f"'{rest or text}' places no tensors.", hint=hint)
    for pattern, _ in places:
        try:
            re.compile(pattern)
            if found := re.search(r"(?<!\\)\(\?[^:=!]", pattern):
                raise re.error(f"llama.cpp has no '{found[0]}'")
        except re.error as error:
            raise InvalidRequest(f"'{pattern}' is no regular expression: {error}.", hint=hint) from error
    return tuple((pattern, RAM if buffer.upper() == RAM else buffer) for pattern, buffer in places)


def host_memory(devices: Sequence[DeviceMemory] = ()) -> Memory:
    """This machine's available RAM, and `devices`."""
    import psutil

    return Memory(int(psutil.virtual_memory().available), tuple(devices))
