"""The sockets that a server listens on, and the certificate of those that speak TLS."""

from __future__ import annotations

import errno
import os
import socket
import ssl
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
