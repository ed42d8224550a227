"""Workers: RPC servers of llama.cpp, which lend the memory and processors of other machines to a model.

A client of the first commands of their protocol (ggml-rpc.cpp). It asks each worker before llama.cpp does, since
llama.cpp ends the process if a worker does not answer as expected.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedRWPair
from statistics import median
from time import perf_counter
from typing import Any

from edgespec.errors import BackendError, InvalidRequest, reason_of
from edgespec.sockets import is_loopback

PORT = 50052
PROTOCOL = (7, 0)  # of llama-cpp-python 0.3.36; a worker may have a lower second number
MAX_WORKERS = 8
MAX_DEVICES = 12  # of all workers; ggml takes 16 with this machine's
INSECURE = (
    "llama.cpp's authors call this protocol insecure: nothing is encrypted, there is no password, and whoever reaches "
    "the port can run code on the worker."
)

_HELLO, _DEVICE_COUNT, _DEVICE_MEMORY = 14, 15, 11  # commands
_CONNECT_S, _ANSWER_S = 5.0, 5.0  # two packets that are lost one after the other take 3 s
_ROUND_TRIPS = 5
_HOST = re.compile(r"\w[\w.-]*", re.ASCII)  # a name or an IPv4 address
_SAME_VERSION = "Install the same version of llama-cpp-python on both machines."
_SYNTAX = "Write workers as HOST:PORT,HOST:PORT, such as 10.0.0.2:50052."


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that has answered.

    devices       (free, total) bytes of each device that it lends; of a processor llama.cpp gives the total twice
    round_trip_s  seconds from a question to its answer, the median of a few
    is_here       whether it runs on this machine, so that its memory is this machine's
    """

    address: str
    devices: tuple[tuple[int, int], ...]
    round_trip_s: float
    is_here: bool = False

    @property
    def free(self) -> int:
        return sum(free for free, _ in self.devices)


def split_addresses(text: str | None) -> tuple[str, ...]:
    """The workers of an option, as HOST:PORT; the port may be left out. Raises InvalidRequest if there are none."""
    if text is None:
        return ()
    parts = (part.strip() for part in text.split(","))
    addresses = tuple(part if ":" in part else f"{part}:{PORT}" for part in parts if part)
    if not addresses:
        raise InvalidRequest("no worker is named.", hint=_SYNTAX)
    return addresses


def check_addresses(addresses: Sequence[str], *, trusts_network: bool) -> None:
    """Raises InvalidRequest for addresses that cannot be meant, and for other machines on a network without trust."""
    for address in addresses:
        host, _, port = address.partition(":")
        if ":" in port and "/" not in address:
            raise InvalidRequest(
                f"{address} is not an IPv4 address, and llama.cpp's workers take no other.", hint=_SYNTAX
            )
        if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise InvalidRequest(f"'{address}' is not HOST:PORT.", hint=_SYNTAX)
        if not trusts_network and not is_loopback(host):
            raise InvalidRequest(
                f"{address} is on a network. {INSECURE}",
                hint=f"Use an ssh tunnel (ssh -N -L {port}:127.0.0.1:{port} {host}) and 127.0.0.1:{port}, "
                "or pass --trust-network.",
            )
    if twice := sorted({each for each in addresses if addresses.count(each) > 1}):
        raise InvalidRequest(f"the worker {twice[0]} is named twice.", hint="Name each worker once.")
    if len(addresses) > MAX_WORKERS:
        raise InvalidRequest(f"{len(addresses)} workers are too many.", hint=f"Name at most {MAX_WORKERS}.")


def find_workers(addresses: Sequence[str]) -> tuple[Worker, ...]:
    """Ask each worker what it lends. Raises BackendError, InvalidRequest if two names mean one worker."""
    if len({resolve(address) for address in addresses}) < len(addresses):
        raise InvalidRequest(f"two of {', '.join(addresses)} are one worker.", hint="Name each worker once.")
    workers = tuple(ask_worker(address) for address in addresses)
    if (count := sum(len(each.devices) for each in workers)) > MAX_DEVICES:
        raise InvalidRequest(
            f"the workers lend {count} devices, and llama.cpp takes {MAX_DEVICES}.",
            hint="Start some with fewer: edgespec worker --device NAME.",
        )
    return workers


def ask_worker(address: str) -> Worker:
    """Connect to a worker, ask what it lends, and leave it. Raises BackendError."""
    import psutil

    place = resolve(address)
    try:
        connection = socket.create_connection(place, _CONNECT_S)
    except OSError as error:
        raise BackendError(
            f"the worker {address} cannot be reached: {reason_of(error)}.",
            hint="Start one there (edgespec worker), and check its address and its firewall.",
        ) from error
    with connection:
        connection.settimeout(_ANSWER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with connection.makefile("rwb") as stream:
                devices, seconds = _ask(stream, address)
        except TimeoutError as error:
            raise BackendError(
                f"{address} accepts connections and answers nobody: it serves another program, or is no worker.",
                hint="A worker serves one model at a time: close the other one, or start another worker.",
            ) from error
        except (OSError, struct.error) as error:
            raise BackendError(
                f"{address} does not speak as a worker of this version does.", hint=_SAME_VERSION
            ) from error
    total = psutil.virtual_memory().total
    is_here = is_loopback(place[0]) and any(abs(size - total) < total // 1000 for _, size in devices)
    return Worker(address, devices, seconds, is_here)


def resolve(address: str) -> tuple[str, int]:
    """The IPv4 address and port of HOST:PORT. Raises BackendError."""
    host, _, port = address.partition(":")
    try:
        return socket.gethostbyname(host), int(port)
    except OSError as error:
        raise BackendError(f"the name of the worker {address} is not known.", hint="Check the host's name.") from error


def _ask(stream: BufferedRWPair[Any, Any], address: str) -> tuple[tuple[tuple[int, int], ...], float]:
    """(free, total) bytes of each device, seconds of a round trip. Raises BackendError, OSError, struct.error."""
    major, minor, patch = _call(stream, _HELLO, "<3B25x", bytes(24))  # of transports TCP alone
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        own = ".".join(map(str, PROTOCOL))
        raise BackendError(
            f"the worker {address} has version {major}.{minor}.{patch} of the protocol, and this machine {own}.",
            hint=_SAME_VERSION,
        )
    seconds = []
    for _ in range(_ROUND_TRIPS):
        started = perf_counter()
        (count,) = _call(stream, _DEVICE_COUNT, "<I")
        seconds.append(perf_counter() - started)
    devices = range(min(count, MAX_DEVICES + 1))
    memory = (_call(stream, _DEVICE_MEMORY, "<QQ", struct.pack("<I", device)) for device in devices)
    return tuple((free, total) for free, total in memory), median(seconds)


def _call(stream: BufferedRWPair[Any, Any], command: int, layout: str, request: bytes = b"") -> tuple[int, ...]:
    """The numbers of an answer. Raises OSError, and struct.error if it has another size or the worker hangs up."""
    stream.write(struct.pack("<BQ", command, len(request)) + request)
    stream.flush()
    (size,) = struct.unpack("<Q", stream.read(8))
    return struct.unpack(layout, stream.read(size) if size == struct.calcsize(layout) else b"")
