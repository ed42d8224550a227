"""The responses of a draft server, read with asyncio."""

from __future__ import annotations

import asyncio
import json
import ssl
from http.client import responses

from edgespec.errors import reason_of

MAX_HEAD = 2**16
"""Bytes of a response's head."""
MAX_BODY = 2**20
"""Bytes of a response that is not a session's."""
_MAX_CHUNK = 2**24


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """(status, header fields by lower-case name) of a response. Raises EOFError, ValueError."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        raise ValueError("it ended the connection" if not error.partial else "it does not speak HTTP") from error
    except asyncio.LimitOverrunError as error:
        raise ValueError("it does not speak HTTP") from error
    first, *lines = head.split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise ValueError("it does not speak HTTP")
    fields = (line.partition(":") for line in lines if line)
    return int(rest[:3]), {name.lower(): value.strip() for name, _, value in fields}


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    length = headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MAX_BODY:
        return b""
    return await reader.readexactly(int(length))


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """The next part of a body in chunks; empty at its end. Raises EOFError, ValueError."""
    size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
    if not 0 <= size <= _MAX_CHUNK:
        raise ValueError("it does not speak HTTP")
    return (await reader.readexactly(size + 2))[:-2]


def read_refusal(status: int, body: bytes) -> str:
    """The reason that the server gives for a status, without its full stop."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        message = f"it says {status} {responses.get(status, '')}"
    return message.rstrip(". ")


def explain(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, asyncio.IncompleteReadError | ConnectionResetError):
        return "it ended the connection"
    if isinstance(error, TimeoutError) and not str(error):
        return "it does not answer"
    return reason_of(error)


def explain_tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or "it does not speak TLS").replace("_", " ").lower()
