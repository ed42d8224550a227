"""The connections of a server: how many there may be, how long one may take to send a request, and how they end."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.server.census import Census
from edgespec.server.http import HttpError, error_response
from edgespec.server.tls import Handshake

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
    census = Census(max(8, min(_MAX_CONNECTIONS, raise_descriptor_limit() - _SPARE_DESCRIPTORS)))
    config = uvicorn.Config(
        app,
        http=partial(Connection, census),  # type: ignore[arg-type] # called like the class
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        lifespan="on",
        backlog=_ACCEPTS,
    )
    asyncio.get_running_loop().set_exception_handler(_ExceptionHandler())
    await HttpServer(config, census, tls).serve(list(listeners))


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

    def __init__(self, census: Census, **options: Any) -> None:
        super().__init__(**options)
        self._census = census
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._census.enter(self._address):
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
        self._census.leave(self._address)
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

    def __init__(self, config: uvicorn.Config, census: Census, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._census = census
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        plain = [each for each in sockets or () if self._tls is None or each.family == socket.AF_UNIX]
        await super().startup(plain)
        for each in sockets or ():
            if self._tls is not None and each not in plain:
                handshake = partial(Handshake, self._connect, self._census, self._tls)
                loop = asyncio.get_running_loop()
                self.servers.append(await loop.create_server(handshake, sock=each, backlog=_ACCEPTS))
            each.listen(_BACKLOG)

    def _connect(self) -> asyncio.Protocol:
        """As uvicorn makes the protocol of a connection."""
        kind: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)
