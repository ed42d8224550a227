"""Addresses of this machine, and connections to machines that may be gone."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Tells whether a name or address is this machine's, as seen from itself alone."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host.lower() == "localhost"


def keep_alive(connection: socket.socket, *, idle_s: int, interval_s: int, probes: int) -> None:
    """Have the system end a TCP connection whose other machine is gone, since that sends no end.

    After `idle_s` of silence it asks every `interval_s`, and gives up when `probes` questions have no answer. A machine
    that is slow answers them. The connections of a listening socket inherit this. Raises OSError.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"TCP_KEEPIDLE": idle_s, "TCP_KEEPALIVE": idle_s, "TCP_KEEPINTVL": interval_s, "TCP_KEEPCNT": probes}
    for name, value in values.items():  # Linux has the first, macOS the second
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
