"""Who may call: keys, hosts and origins that are meant, bodies that are not too large. Pure ASGI, before all routes."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.server.http import HttpError, error_response

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
_OPEN = frozenset({"/health", "/", "/page.js", "/page.css"})  # tell nothing that needs a key


@dataclass(frozen=True, slots=True)
class Rules:
    """api_key   None: whoever reaches the server may call it
    hosts     names that a Host header may have, without the port; None: any, for servers that need a key
    origins   web pages that may call, such as 'http://localhost:3000', beside the server's own
    body      bytes of a body at most
    """

    api_key: str | None = None
    hosts: frozenset[str] | None = LOOPBACK
    origins: frozenset[str] = frozenset()
    body: int = 16 * 2**20


def _place(origin: str) -> str:
    """Host and port of an origin."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


class Guard:
    """Lets through what the rules allow."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check(scope["path"], scope["method"], headers)
            await self._app(scope, self._bounded(headers, receive), watched)
        except HttpError as error:
            if started:
                raise
            await error_response(scope["path"], error)(scope, receive, send)

    def _check(self, path: str, method: str, headers: Mapping[str, str]) -> None:
        """Raises HttpError."""
        rules = self._rules
        host = headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if rules.hosts is not None and name.lower() not in rules.hosts:
            raise HttpError(403, "this server does not answer to that host name.", hint="Allow it with --allow-host.")
        origin = headers.get("origin")
        if origin is not None and origin not in rules.origins and _place(origin) != host:
            raise HttpError(403, "web pages of another origin may not call.", hint="Allow them with --allow-origin.")
        if rules.api_key is None or path in _OPEN or method == "OPTIONS":
            return
        given = headers.get("authorization", "").removeprefix("Bearer ").strip() or headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), rules.api_key.encode()):
            raise HttpError(401, "the API key is missing or wrong.", hint="Send Authorization: Bearer KEY.")

    def _bounded(self, headers: Mapping[str, str], receive: Receive) -> Receive:
        most = self._rules.body
        too_large = HttpError(413, f"the body is larger than {most:,} bytes.", hint="Send less.")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal() or len(length) > 15 or int(length) > most:
            raise too_large
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                raise too_large
            return message

        return bounded
