"""The connections of a server: how many there may be, how long one may take to send a request, and how they end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from edgespec.errors import InvalidRequest, reason_of
from edgespec.server.http import HttpError, error_response

# How many connections there are, and from where.


class ConnectionCounter:
    """Counts connections. There may be `limit` of them, half as many from one address."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count a connection; whether it may stay. `leave` follows in both cases."""
        self._counts[address] += 1
        return self._counts[address] <= self._limit // 2 and self._counts.total() <= self._limit

    def leave(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


# TLS: the certificate of a server, and the handshake of a connection.


_HANDSHAKE_S = 10.0


class Handshake(asyncio.Protocol):
    """A connection until TLS is spoken on it; then another protocol has it.

    asyncio's own servers do not tell of a connection before its handshake, so those without an end would not count.
    """

    def __init__(
        self, make: Callable[[], asyncio.Protocol], counter: ConnectionCounter, context: ssl.SSLContext
    ) -> None:
        """`make` makes the protocol that follows."""
        self._make = make
        self._counter = counter
        self._context = context
        self._early = b""  # what came with the end of the handshake
        self._next: asyncio.Protocol | None = None
        self._is_lost = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as asyncio calls it
        transport.pause_reading()  # what arrives is for TLS
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._next is not None:
            self._next.connection_lost(exc)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        address = (get_remote_addr(transport) or ("", 0))[0]
        secure = None
        if self._counter.enter(address):
            with suppress(OSError):  # also of ssl: the client left, was too slow, or does not speak TLS
                secure = await asyncio.get_running_loop().start_tls(
                    transport, self, self._context, server_side=True, ssl_handshake_timeout=_HANDSHAKE_S
                )
        self._counter.leave(address)
        if secure is None:
            transport.abort()
        elif not self._is_lost:
            self._next = self._make()
            secure.set_protocol(self._next)
            self._next.connection_made(secure)
            if self._early:
                self._next.data_received(self._early)


def load_certificate(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS with a certificate and its private key, both in PEM format; intermediate certificates follow the first one.

    Raises InvalidRequest for files that cannot be read, do not belong together, or whose certificate is not valid
    today, which clients would tell as an obscure failure.
    """
    for path in (certificate, key):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidRequest(
                f"cannot read {path}: {reason_of(error)}.", hint="Check its name and permissions."
            ) from error
        if b"ENCRYPTED" in data:
            raise InvalidRequest(f"{path} has a passphrase.", hint="Write one without: openssl pkey -in FILE -out NEW")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
        _shake_hands(context, certificate)
    except ssl.SSLCertVerificationError as error:
        raise InvalidRequest(
            f"clients would refuse {certificate}: {error.verify_message}.", hint="Get a new certificate."
        ) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"{key} is not the private key of {certificate}."
        else:
            message = f"{certificate} and {key} are not a certificate and its private key in PEM format."
        raise InvalidRequest(message, hint="Name the files that belong together.") from error
    return context


def _shake_hands(server: ssl.SSLContext, certificate: Path) -> None:
    """A handshake in memory with a client that trusts this very certificate. Raises ssl.SSLError."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for end in (*ends, *ends):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


_HEAD_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 4096
_DESCRIPTORS = (65_536, 10_240)  # limits to try; macOS may refuse more than the second one
_SPARE_DESCRIPTORS = 96  # for engines, files, and connections that are about to be refused
_ACCEPTS = 16  # new connections in one turn of the event loop
_BACKLOG = 1024  # connections that the system keeps until they are accepted
_LOG_PAUSE_S = 60.0
_LOG = logging.getLogger("edgespec.server")


async def serve(app: ASGIApp, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None = None) -> None:
    """Serve an application until Ctrl-C, which raises KeyboardInterrupt, or SIGTERM. Unix sockets need no TLS."""
    counter = ConnectionCounter(max(8, min(_MAX_CONNECTIONS, raise_descriptor_limit() - _SPARE_DESCRIPTORS)))
    config = uvicorn.Config(
        app,
        http=partial(Connection, counter),  # type: ignore[arg-type] # called like the class
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        lifespan="on",
        backlog=_ACCEPTS,
    )
    asyncio.get_running_loop().set_exception_handler(_ExceptionHandler())
    await HttpServer(config, counter, tls).serve(list(listeners))


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

    def __init__(self, counter: ConnectionCounter, **options: Any) -> None:
        super().__init__(**options)
        self._counter = counter
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._counter.enter(self._address):
            self._start_timer()
        else:
            self._refuse(HttpError(503, "there are too many connections.", hint="Close some, or try again later."))

    def data_received(self, data: bytes) -> None:
        before = self.scope
        super().data_received(data)
        if self.scope is not before:
            self._stop_timer()
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._counter.leave(self._address)
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        late = HttpError(408, f"no request arrived within {_HEAD_TIMEOUT_S:.0f} seconds.", hint="Send it at once.")
        self._timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._refuse, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: HttpError) -> None:
        response = error_response("", error)
        head = [(b"connection", b"close"), *response.raw_headers]
        lines = [b"HTTP/1.1 %d Refused" % error.status, *(b": ".join(pair) for pair in head), b"", b""]
        self.transport.write(b"\r\n".join(lines) + bytes(response.body))
        self.transport.close()


class _ExceptionHandler:
    """Says at most once a minute that no file descriptor is left; asyncio would log each attempt to accept."""

    def __init__(self) -> None:
        self._said_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif self._said_s is None or monotonic() - self._said_s > _LOG_PAUSE_S:
            self._said_s = monotonic()
            _LOG.warning("no file descriptor is left for new connections; `ulimit -n` shows the limit")


class HttpServer(uvicorn.Server):
    """uvicorn's server, which ends the requests in progress when it stops.

    Every request is cancelled; the application answers it with an error.
    """

    def __init__(self, config: uvicorn.Config, counter: ConnectionCounter, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._counter = counter
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        plain = [each for each in sockets or () if self._tls is None or each.family == socket.AF_UNIX]
        await super().startup(plain)
        for each in sockets or ():
            if self._tls is not None and each not in plain:
                handshake = partial(Handshake, self._connect, self._counter, self._tls)
                loop = asyncio.get_running_loop()
                self.servers.append(await loop.create_server(handshake, sock=each, backlog=_ACCEPTS))
            each.listen(_BACKLOG)

    def _connect(self) -> asyncio.Protocol:
        """Make the protocol of a connection as uvicorn does."""
        kind: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

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
