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


def load_certificate(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS with a certificate and its private key, both in PEM format; intermediate certificates follow the first one.

    Raises InvalidRequest for files that cannot be read, do not belong together, or have a passphrase.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")  # without a password OpenSSL would ask for a passphrase
    except OSError as error:  # SSLError is one too
        raise InvalidRequest(
            f"cannot use {certificate} and {key}: {reason_of(error)}.",
            hint="Name a certificate and its private key, in PEM format and without a passphrase.",
        ) from error
    return context


_HEAD_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 4096
_DESCRIPTORS = 10_240  # macOS may refuse more
_SPARE_DESCRIPTORS = 96  # for engines, files, and connections that are about to be refused
_HANDSHAKE_S = 10.0
_PROBE_AGAIN_S, _MAX_PROBE_S = 0.2, 5.0
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
        backlog=_BACKLOG,
        limit_concurrency=max(8, min(_MAX_CONNECTIONS, raise_descriptor_limit() - _SPARE_DESCRIPTORS)),
    )
    await HttpServer(config, tls).serve(list(listeners))


def raise_descriptor_limit() -> int:
    """Raise the limit of open files if it is low and the system allows it. Returns the limit that then holds, or
    _DESCRIPTORS if it is higher.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _DESCRIPTORS:
        return _DESCRIPTORS
    with suppress(ValueError, OSError):
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Connection(H11Protocol):
    """A client's connection. It is closed if the client does not send the whole head of a request in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, transport.close)

    def handle_events(self) -> None:
        """Read requests from the bytes that have arrived, which may hold a part of one. The time for a head ends with
        its arrival, and runs again from the end of the answer.
        """
        before = self.scope
        super().handle_events()
        if self.scope is not before:
            self._timer.cancel()
        elif self._timer.cancelled() and self.cycle.response_complete:
            self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.close)

    def eof_received(self) -> bool:  # type: ignore[override] # as asyncio has it
        """Whether the connection stays open: a client that has only closed its sending half gets its answer.

        A client that has gone replies to further bytes with a TCP reset, which tells the two apart; `_probe` sends such
        bytes. A TLS connection ends with the client's half, and HTTP/1.0 has no interim responses, so these are closed.
        """
        is_answered = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if is_answered or self.scope is None or self.scope["http_version"] != "1.1" or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        self._probe(_PROBE_AGAIN_S)
        return True

    def _probe(self, pause_s: float) -> None:
        """Send interim responses, which every client skips, until the answer begins. A client that has gone replies to
        one with a TCP reset, so that the next one fails.
        """
        if not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(pause_s, self._probe, min(2 * pause_s, _MAX_PROBE_S))


class HttpServer(uvicorn.Server):
    """uvicorn's server with TLS for some of its sockets. When it stops, it cancels every request in progress, which the
    application answers with an error.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # starts the application; the sockets follow
        loop = asyncio.get_running_loop()
        for each in sockets or ():
            tls = self._tls if each.family != socket.AF_UNIX else None
            server = await loop.create_server(
                lambda: Connection(self.config, self.server_state, self.lifespan.state),
                sock=each,
                backlog=self.config.backlog,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
            )
            self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)


_PROBE_S = 1.0


def listen_tcp(host: str, port: int, *, is_only: bool = True) -> socket.socket:
    """A listening socket; clients can connect to it before the server runs. Raises InvalidRequest.

    `is_only`: whether the server listens on this host alone, so that `::` may take IPv4 connections too.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        takes_both = family == socket.AF_INET6 and is_only and socket.has_dualstack_ipv6()
        listener = socket.create_server(address[:2], family=family, dualstack_ipv6=takes_both)
        # Connections inherit it: with Nagle's algorithm a reply waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        reason = reason_of(error).partition(" (")[0]  # the rest repeats the address
        raise InvalidRequest(
            f"cannot listen on {host}, port {port}: {reason}.", hint="Choose another --port or --host."
        ) from error
    return listener


@contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket that only this user can connect to; its file is removed at the end.

    The socket of a killed server is replaced. Raises InvalidRequest if there is another file or program.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        mask = os.umask(0o177)
        try:
            if path.is_socket():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    probe.settimeout(_PROBE_S)
                    if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
                        raise OSError(errno.EADDRINUSE, "another program listens there")
                path.unlink()
            listener.bind(str(path))
            listener.listen()
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen at {path}: {reason_of(error)}.", hint="Choose another --unix."
            ) from error
        finally:
            os.umask(mask)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)
