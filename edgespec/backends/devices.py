"""Memory of this machine and of its accelerators."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Free memory: RAM available without swapping, in bytes, and the accelerators."""

    ram_available: int
    devices: tuple[DeviceMemory, ...] = ()

    @property
    def own_device_bytes(self) -> int:
        """Free bytes on devices that have memory of their own, less the reserve on each."""
        return sum(max(0, device.free - RESERVE_BYTES) for device in self.devices if not device.shares_ram)

    @property
    def usable(self) -> int:
        """Bytes that weights and caches may take, RAM and devices together."""
        ram = max(0, self.ram_available - RESERVE_BYTES)
        limits = [device.total for device in self.devices if device.holds_all]
        return min(ram, *limits) if limits else ram + self.own_device_bytes


def host_memory(devices: tuple[DeviceMemory, ...] = ()) -> Memory:
    """This machine's available RAM, and `devices`."""
    import psutil

    return Memory(int(psutil.virtual_memory().available), devices)
