"""The sockets that a server listens on."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgespec.errors import InvalidRequest, reason_of

_PROBE_S = 1.0


def listen_tcp(host: str, port: int, *, is_only: bool = True) -> socket.socket:
    """A listening socket; clients can connect to it before the server runs. Raises InvalidRequest.

    `is_only`: whether it is the only host, so that `::` may take IPv4 too.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio disables Nagle's algorithm only for sockets that name TCP; with it a reply waits 40 ms for an ACK.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not is_only:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {host}, port {port}: {error.strerror}.", hint="Choose another --port or --host."
        ) from error
    return listener


@contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket that only this user can connect to; its file is removed at the end.

    A file that a killed server has left is replaced. Raises InvalidRequest where another program listens, or the file
    is none of a socket.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path)
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            listener.listen()
            inode = path.stat().st_ino
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen at {path}: {reason_of(error)}.", hint="Choose another --unix."
            ) from error
        try:
            yield listener
        finally:
            with suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the file of a socket at which nothing listens. Raises OSError where there is anything else."""
    if not path.is_socket():
        if path.exists():
            raise OSError(errno.EEXIST, "there is a file that is not a socket")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(errno.EADDRINUSE, "another program listens there")
