"""Several hosts on one machine, joined by a network with a delay and a loss: Linux network namespaces.

A TUN device of each namespace is read by one process, which keeps each IP packet for half of the round trip or drops
it. The kernels' own TCP runs on both sides, as it would over `tc netem`, which not every kernel has. Needs root, or
user namespaces and a readable /dev/net/tun; and the programs unshare, nsenter and ip.

    python -m benchmarks.slow_link --rtt-ms 5 --loss 0.05    # a ping between two hosts; stdout is one JSON line
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, perf_counter, sleep

import click

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 65_000  # few packets a megabyte, since each of them is forwarded in Python
_LOSSY_MTU = 1_500  # a loss hits as much as on Ethernet
_HOLD, _FORWARD, _PING = "hold", "forward", "ping"


class SlowLink:
    """Hosts 0 to `n_hosts` - 1, each with an address of its own and a loopback. Raises OSError where it cannot be made.

    The delay and the loss may be changed at any time; they begin with none.
    """

    def __init__(self, n_hosts: int = 2, *, is_lossy: bool = False) -> None:
        """`is_lossy`: packets are as short as on Ethernet, for experiments with a loss."""
        if reason := find_obstacle():
            raise OSError(reason)
        self._holders: list[subprocess.Popen[bytes]] = []
        devices: list[int] = []
        try:
            for host in range(n_hosts):
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    mtu = _LOSSY_MTU if is_lossy else _MTU
                    command = [*_unshare(), *_self(_HOLD), str(theirs.fileno()), self.address(host), str(mtu)]
                    holder = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])
                    self._holders.append(holder)
                    theirs.close()
                    _, found, _, _ = socket.recv_fds(ours, 1, 1)
                if not found:
                    raise OSError("a network namespace could not be made")
                devices += found
            command = [*_self(_FORWARD), *(str(device) for device in devices)]
            self._forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=devices)
        except BaseException:
            self._end_holders()
            raise
        finally:
            for device in devices:
                os.close(device)

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._forwarder)
        self._end_holders()

    @staticmethod
    def address(host: int) -> str:
        """The IP address of a host."""
        return f"10.77.0.{host + 1}"

    def set(self, rtt_s: float, loss: float = 0.0) -> None:
        """Delay each packet by half of `rtt_s`, and drop it with probability `loss`."""
        assert self._forwarder.stdin is not None
        self._forwarder.stdin.write(struct.pack("dd", rtt_s / 2, loss))
        self._forwarder.stdin.flush()

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on a host."""
        as_user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self._holders[host].pid}", "--net", *as_user, "--", *arguments]

    def measure_rtt(self) -> float:
        """Median seconds of 50 pings from host 0 to host 1; it includes the time of the forwarding process."""
        command = self.command(0, [*_self(_PING), self.address(1), "50"])
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def _end_holders(self) -> None:
        for holder in self._holders:
            _end(holder)


def find_obstacle() -> str | None:
    """Why this machine cannot make a SlowLink, as a clause; None where it can."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"the program '{program}' is missing"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    made = subprocess.run([*_unshare(), "ip", "link"], capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed: {made.stderr.strip()}" if made.returncode else None


def _unshare() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", *as_root, "--"]


def _self(role: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.slow_link", role]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that ends with its input."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()


def _hold(channel: int, address: str, mtu: str) -> None:
    """Make the device of this namespace, send it to the parent, and keep the namespace until the input ends."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI))
    for command in (
        "ip link set lo up",
        f"ip link set tun0 mtu {mtu} txqueuelen 10000 up",
        f"ip address add {address}/24 dev tun0",
    ):
        subprocess.run(command.split(), check=True)
    with socket.socket(fileno=channel) as parent:
        socket.send_fds(parent, [b"\0"], [device])
    os.close(device)
    sys.stdin.buffer.read()


def _forward(devices: list[int]) -> None:
    """Move packets between the devices until the input ends; it names new delays and losses."""
    with suppress(PermissionError):
        os.nice(-10)  # a forwarder that waits for a core delays more than it should
    delay_s, loss = 0.0, 0.0
    draw = random.Random(0)
    late: list[tuple[float, int, int, bytes]] = []  # (due, number, device, packet), a heap
    number, control = 0, sys.stdin.fileno()
    while True:
        timeout_s = max(0.0, late[0][0] - monotonic()) if late else None
        ready, _, _ = select.select([control, *devices], [], [], timeout_s)
        for source in ready:
            if source == control:
                message = os.read(control, 16)
                if len(message) < 16:
                    return
                delay_s, loss = struct.unpack("dd", message)
                continue
            packet = os.read(source, 2**16)
            host = packet[19] - 1  # the last byte of the destination in an IPv4 header
            if packet[0] >> 4 != 4 or not 0 <= host < len(devices) or (loss and draw.random() < loss):
                continue
            number += 1
            heapq.heappush(late, (monotonic() + delay_s, number, devices[host], packet))
        while late and late[0][0] <= monotonic():
            _, _, device, packet = heapq.heappop(late)
            os.write(device, packet)


def _ping(address: str, n: int) -> float:
    """Median seconds of an ICMP echo; lost ones do not count."""
    times: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as echo:
        echo.settimeout(2.0)
        for sequence in range(1, n + 1):
            started = perf_counter()
            echo.sendto(_echo_request(sequence), (address, 0))
            with suppress(TimeoutError):
                while True:
                    reply = echo.recv(2048)[20:]
                    if reply[0] == 0 and struct.unpack(">H", reply[6:8])[0] == sequence:
                        times.append(perf_counter() - started)
                        break
            sleep(0.002)
    return statistics.median(times)


def _echo_request(sequence: int) -> bytes:
    identifier = os.getpid() & 0xFFFF
    header = struct.pack(">BBHHH", 8, 0, 0, identifier, sequence)
    total = sum(struct.unpack(">4H", header))
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return struct.pack(">BBHHH", 8, 0, checksum, identifier, sequence)


@click.command()
@click.option("--rtt-ms", type=click.FloatRange(0), default=5.0, show_default=True)
@click.option("--loss", type=click.FloatRange(0, 0.9), default=0.0, show_default=True)
def main(rtt_ms: float, loss: float) -> None:
    """Measure the round trip between two hosts."""
    from benchmarks.harness import print_result  # not in the processes that only hold or forward

    with SlowLink(is_lossy=loss > 0) as link:
        link.set(rtt_ms / 1000, loss)
        print_result("slow_link", {"set_ms": rtt_ms, "loss": loss, "median_ms": round(1000 * link.measure_rtt(), 3)})


if __name__ == "__main__":
    role, *rest = sys.argv[1:] or [""]
    if role == _HOLD:
        _hold(int(rest[0]), rest[1], rest[2])
    elif role == _FORWARD:
        _forward([int(device) for device in rest])
    elif role == _PING:
        print(_ping(rest[0], int(rest[1])))
    else:
        main()
