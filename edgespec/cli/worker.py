"""`edgespec worker`: lend this machine's memory and processors to a model on another machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

import click

from edgespec.cli.interrupts import INTERRUPTED
from edgespec.cli.options import offer
from edgespec.errors import BackendError, CacheError, InvalidRequest, reason_of
from edgespec.options import OPTIONS
from edgespec.sockets import is_loopback
from edgespec.units import count, gib

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.library import Device
    from edgespec.backends.llamacpp.weights_cache import WeightsCache

HOST, PORT = "127.0.0.1", 50052
_CAME, _WENT = "Accepted client connection", "Client connection closed"


@click.command("worker")
@click.option("--host", default=HOST, help="IPv4 address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=PORT, help="Port to listen on.")
@offer(OPTIONS["threads"], help="CPU threads. [default: the idle physical cores]")
@offer(
    OPTIONS["device"],
    cls=click.Option,
    help="Devices to lend, as `edgespec doctor` names them. [default: the GPUs, else the CPU]",
)
@click.option(
    "--cache/--no-cache",
    "has_cache",
    default=False,
    help="Keep large weights on this disk, so that a model is sent once.",
)
@click.option(
    "--trust-network",
    is_flag=True,
    help="Listen on a network, where whoever reaches the port can run code on this machine.",
)
def worker_command(
    host: str, port: int, threads: int | None, device: str | None, has_cache: bool, trust_network: bool
) -> int:
    """Lend this machine to a model on another one: `edgespec chat REF --workers HOST:PORT` there.

    A worker serves one model at a time, on llama.cpp. Its port has no password and no encryption, so it listens on this
    machine alone; the other one reaches it through ssh: `ssh -N -L 50052:127.0.0.1:50052 user@this-machine`.
    """
    from edgespec.backends.llamacpp.rpc import require_rpc
    from edgespec.backends.options import idle_cores
    from edgespec.server.connections import listen_tcp

    address = _check_host(host, trust_network)
    require_rpc()
    devices = _choose_devices(device)
    cache = _open_cache() if has_cache else None
    listen_tcp(address, port).close()  # if that is not possible, ggml would end the process
    threads = threads or idle_cores()
    click.echo("\n".join(_describe(host, address, port, devices, threads, cache)))
    if trust_network:
        from edgespec.machines.workers import INSECURE

        click.echo(f"warning: {INSECURE}", err=True)
    return _run(address, port, devices, threads, cache)


def _check_host(host: str, trust_network: bool) -> str:
    from edgespec.machines.workers import INSECURE

    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise InvalidRequest(
            f"'{host}' is no IPv4 address of this machine.", hint="Use an address such as 10.0.0.2."
        ) from error
    if not is_loopback(address) and not trust_network:
        raise InvalidRequest(
            f"other machines reach {host}. {INSECURE}",
            hint="Listen on 127.0.0.1 and use an ssh tunnel, or pass --trust-network.",
        )
    return address


def _choose_devices(text: str | None) -> tuple[Device, ...]:
    """The devices of these names; without names the accelerators, else the processor."""
    from edgespec.backends.llamacpp.library import library
    from edgespec.machines.memory import split_names

    if text is not None:
        return library().find_devices(split_names(text), only_gpus=False)
    processors = (device for device in library().devices() if device.kind == "cpu")
    return library().find_devices() or tuple(processors)


def _open_cache() -> WeightsCache:
    from edgespec.autopilot.store import calibration_folder
    from edgespec.backends.llamacpp.weights_cache import WeightsCache

    folder = calibration_folder().parent / "worker"
    try:
        return WeightsCache(folder)
    except OSError as error:
        raise CacheError(f"{folder} cannot be written: {reason_of(error)}.", hint="Drop --cache.") from error


def _describe(
    host: str, address: str, port: int, devices: tuple[Device, ...], threads: int, cache: WeightsCache | None
) -> Iterator[str]:
    """What is lent, and how another machine takes it."""
    import psutil

    for device in devices:
        free, cores = device.free, ""
        if device.kind == "cpu":
            free, cores = psutil.virtual_memory().available, f", {count(threads, 'CPU thread')}"
        yield f"Lending {device.name}: {device.description.strip()}, {gib(free)} free{cores}"
    if cache is not None:
        yield f"Keeping weights in {cache.folder}: {gib(cache.size)} now"
    if is_loopback(address):
        yield f"On another machine: ssh -N -L {port}:127.0.0.1:{port} USER@{socket.gethostname()}"
        yield f"and beside it:      edgespec chat REF --workers 127.0.0.1:{port}"
    else:
        name = socket.gethostname() if host == "0.0.0.0" else host
        yield f"On another machine: edgespec chat REF --workers {name}:{port} --trust-network"
    yield f"Listening at {address}:{port}; press Ctrl-C to stop."


def _run(address: str, port: int, devices: tuple[Device, ...], threads: int, cache: WeightsCache | None) -> int:
    """Run ggml's server on a thread until a signal. Raises BackendError if it could not begin.

    That thread never returns, so the process ends here.
    """
    from edgespec.backends.llamacpp.rpc import serve

    ours, theirs = os.pipe()
    screen = os.fdopen(os.dup(1), "w", buffering=1, errors="replace")
    os.dup2(theirs, 1)  # ggml's lines are read, and its clients reported in our words
    os.close(theirs)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()

    def run() -> None:
        serve(address, port, [device.name for device in devices], threads, cache.folder if cache is not None else None)
        os.kill(os.getpid(), signal.SIGUSR1)

    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # of all threads: sigwait takes them
    threading.Thread(target=run, daemon=True).start()
    threading.Thread(target=_report_clients, args=(ours, screen, port, cache), daemon=True).start()
    number = signal.sigwait(ends)
    if number == signal.SIGUSR1:
        raise BackendError("llama.cpp's server has ended by itself.", hint="Start the worker again.")
    with suppress(OSError):
        screen.write("\n" if number == signal.SIGINT else "")
        screen.flush()
    os._exit(INTERRUPTED if number == signal.SIGINT else 0)


def _report_clients(pipe: int, screen: TextIO, port: int, cache: WeightsCache | None) -> None:
    """Report who comes and goes, from the lines that ggml writes."""
    from edgespec.backends.llamacpp.rpc import notice_silence

    with os.fdopen(pipe, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(OSError):  # nobody reads, or the disk is full
                if line.startswith(_CAME):
                    notice_silence(("", port))
                    if cache is not None:
                        cache.begin()
                    screen.write("a client has connected\n")
                elif line.startswith(_WENT):
                    if cache is not None:
                        cache.end()
                    screen.write("the client has left\n")
