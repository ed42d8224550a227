"""Guard: ASGI middleware that checks the API key, the Host and Origin headers and the size of the body."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.server.hops import check_hops
from edgespec.server.http import HttpError, ServerStops, error_response
from edgespec.server.keys import Caller, Keys
from edgespec.server.record import current_record
from edgespec.server.web_page import PAGE_PATHS

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
_OPEN = PAGE_PATHS | {"/health"}  # need no key


@dataclass(frozen=True, slots=True)
class Rules:
    """What the guard lets through.

    keys            keys of which clients must send one; None: no key
    hosts           host names, without port, that a Host header may hold; None: any, for servers with a key
    origins         origins of web pages that may call, besides its own, such as 'http://localhost:3000'; or '*'
    max_body_bytes  size limit of a request body
    """

    keys: Keys | None = None
    hosts: frozenset[str] | None = LOOPBACK
    origins: frozenset[str] = frozenset()
    max_body_bytes: int = 16 * 2**20


class Guard:
    """Rejects requests that break the rules, before any route sees them."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers = Headers(scope=scope)
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._check_origin(scope, headers)
            current_record().caller = self._identify(scope, headers)
            check_hops(headers)
            await self._app(scope, self._limit_body(headers, receive), note_start)
        except HttpError as error:
            if started:
                raise
            await error_response(scope["path"], error)(scope, receive, send)
        except asyncio.CancelledError:  # the server stops
            if started:
                raise
            await error_response(scope["path"], ServerStops())(scope, receive, send)

    def _check_origin(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises HttpError."""
        rules = self._rules
        host = headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if rules.hosts is not None and name.lower() not in rules.hosts and not _is_unix(scope):
            raise HttpError(403, "the host name in the request is not allowed.", hint="Allow it with --allow-host.")
        origin = headers.get("origin")
        if origin is not None and not {origin, "*"} & rules.origins and _get_host(origin) != host:
            raise HttpError(403, "requests from this origin are not allowed.", hint="Allow it with --allow-origin.")

    def _identify(self, scope: Scope, headers: Mapping[str, str]) -> Caller:
        """Who sends a request. Raises HttpError."""
        if self._rules.keys is None:
            is_local = _is_local(scope)
            return Caller(may_manage=is_local, remembers=is_local)
        scheme, _, key = headers.get("authorization", "").strip().partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        caller = self._rules.keys.identify(key) if key else None
        if caller is None and scope["path"] not in _OPEN:
            raise HttpError(401, "the API key is missing or wrong.", hint="Send the header Authorization: Bearer KEY.")
        return caller or Caller()

    def _limit_body(self, headers: Mapping[str, str], receive: Receive) -> Receive:
        """`receive`, which raises HttpError beyond the size limit. Raises HttpError for a Content-Length beyond it."""
        limit = self._rules.max_body_bytes
        too_large = HttpError(413, f"the body is larger than {limit:,} bytes.", hint="Send a smaller body.")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdecimal() or len(length) > 15 or int(length) > limit:
            raise too_large
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise too_large
            return message

        return receive_limited


def _get_host(origin: str) -> str:
    """Host and port of an origin; "" if it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_unix(scope: Scope) -> bool:
    """Whether a request came over a Unix socket, which has no port. Browsers cannot connect to one."""
    server = scope.get("server")
    return server is not None and server[1] is None


def _is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine. A proxy's X-Forwarded-For counts, whatever is in it."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        return _is_unix(scope) or ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def require_manager() -> None:
    """Raises HttpError (403) unless the caller of the current request may load, unload and download models.

    A handler calls it before it reads the body:

        async def pull_model(request: Request) -> Response:
            require_manager()
            body = await read_body(request, PullRequest)

    A key may manage models if its entry says so (`edgespec key add NAME --manage`), and so may that of --api-key.
    Where a server has no keys, callers on this machine may.
    """
    if not current_record().caller.may_manage:
        raise HttpError(
            403, "this caller may not manage models.", hint="Send a key made with `edgespec key add --manage`."
        )
