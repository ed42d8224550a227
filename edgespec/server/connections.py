"""The sockets and connections of a server: TLS, how many there may be, and how they end."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.errors import InvalidRequest, reason_of

# TLS: the certificate of a server.


def load_certificate(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS with a certificate and its private key, both in PEM format; intermediate certificates follow the first one.

    Raises InvalidRequest for files that cannot be read, do not belong together, or have a passphrase.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")  # without a password OpenSSL would ask for a passphrase
    except OSError as error:  # also of ssl
        raise InvalidRequest(
            f"cannot use {certificate} and {key}: {reason_of(error)}.",
            hint="Name a certificate and its private key, in PEM format and without a passphrase.",
        ) from error
    return context


# The server: how many connections it has, how long one may take to send a request, and how they end.


_HEAD_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 4096
_DESCRIPTORS = (65_536, 10_240)  # limits to try; macOS may refuse more than the second one
_SPARE_DESCRIPTORS = 96  # for engines, files, and connections that are about to be refused
_HANDSHAKE_S = 10.0
_ACCEPTS = 16  # new connections in one turn of the event loop
_BACKLOG = 1024  # connections that the system keeps until they are accepted


async def serve(app: ASGIApp, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None = None) -> None:
    """Serve an application until Ctrl-C, which raises KeyboardInterrupt, or SIGTERM. Unix sockets need no TLS."""
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        lifespan="on",
        backlog=_ACCEPTS,
        limit_concurrency=max(8, min(_MAX_CONNECTIONS, raise_descriptor_limit() - _SPARE_DESCRIPTORS)),
    )
    await HttpServer(config, tls).serve(list(listeners))


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as the system allows; the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _DESCRIPTORS:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or limit <= soft:
            break
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    return soft if soft != resource.RLIM_INFINITY else max(_DESCRIPTORS)


class Connection(H11Protocol):
    """A connection, which is closed if it sends no whole head of a request in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        before = self.scope
        super().data_received(data)
        if self.scope is not before:
            self._stop_timer()
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._refuse)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self) -> None:
        self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn's server with TLS for some of its sockets. When it stops, it cancels every request in progress, which the
    application answers with an error.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # which has no connections yet
        loop = asyncio.get_running_loop()
        for each in sockets or ():
            tls = self._tls if each.family != socket.AF_UNIX else None
            timeout_s = _HANDSHAKE_S if tls is not None else None
            self.servers.append(
                await loop.create_server(
                    self._connect, sock=each, ssl=tls, ssl_handshake_timeout=timeout_s, backlog=_ACCEPTS
                )
            )
            each.listen(_BACKLOG)

    def _connect(self) -> asyncio.Protocol:
        """Make the protocol of a connection as uvicorn does."""
        return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)


# The sockets that a server listens on.


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
