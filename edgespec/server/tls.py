"""TLS: the certificate of a server, and the handshake of a connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from uvicorn.protocols.utils import get_remote_addr

from edgespec.errors import InvalidRequest, reason_of
from edgespec.server.census import Census

_HANDSHAKE_S = 10.0


class Handshake(asyncio.Protocol):
    """A connection until TLS is spoken on it; then another protocol has it.

    asyncio's own servers do not tell of a connection before its handshake, so those without an end would not count.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], census: Census, context: ssl.SSLContext) -> None:
        """`make` makes the protocol that follows."""
        self._make = make
        self._census = census
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
        if self._census.enter(address):
            with suppress(OSError):  # also of ssl: the client left, was too slow, or does not speak TLS
                secure = await asyncio.get_running_loop().start_tls(
                    transport, self, self._context, server_side=True, ssl_handshake_timeout=_HANDSHAKE_S
                )
        self._census.leave(address)
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
