"""Guard: ASGI middleware that checks the API key, the Host and Origin headers and the size of the body."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.errors import CacheError, InvalidRequest, reason_of
from edgespec.files import parse_toml, write_private
from edgespec.server.fields import describe_fault
from edgespec.server.http import HttpError, check_proxy_loop, error_response, explain
from edgespec.server.record import ONLY_KEY, Caller, hash_key, request_context
from edgespec.sockets import is_loopback

_TYPES = {"html": "text/html", "css": "text/css", "mjs": "text/javascript"}
_FOLDER = files("edgespec.server") / "page"
_FILES = {f"/page/{each.name}": each for each in _FOLDER.iterdir() if each.name.split(".")[-1] in _TYPES}
_FILES["/"] = _FILES.pop("/page/index.html")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
LOCAL_ORIGINS = re.compile(
    r"https?://(([\w-]+\.)?localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(:\d{1,5})?|(app|file|tauri|vscode-webview|vscode-file)://.*"
)
"""Origins of the pages and programs of this machine. They may call without --allow-origin, as they may call Ollama, but
may not manage models.
"""

PAGE_PATHS = frozenset(_FILES)
"""The paths of the web page at /: a conversation with the models, and the state of the server. They hold no secret."""


def page_routes() -> list[Route]:
    async def get_file(request: Request) -> Response:
        found = _FILES[request.url.path.rstrip("/") or "/"]
        kind = _TYPES[found.name.split(".")[-1]]
        return Response(found.read_text(encoding="utf-8"), media_type=kind, headers=_HEADERS)

    return [Route(path, get_file) for path in sorted(PAGE_PATHS)]


LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
_OPEN = PAGE_PATHS | {"/health"}  # need no key
_MAX_BODY = 16 * 2**20  # bytes


@dataclass(frozen=True, slots=True)
class Rules:
    """What the guard lets through.

    keys     returns the present callers by the hashes of their keys; None: clients need no key
    hosts    host names, without port, that a Host header may hold; None: any, for servers with a key
    origins  origins of web pages that may call, besides its own, such as 'http://localhost:3000'; or '*'
    """

    keys: Callable[[], Mapping[bytes, Caller]] | None = None
    hosts: frozenset[str] | None = LOOPBACK
    origins: frozenset[str] = frozenset()


class Guard:
    """Rejects requests that break the rules, before any route sees them, and answers those whose handler fails."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _to_origin_form(scope)
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers = Headers(scope=scope)
        context = request_context()
        try:
            if "content-length" in headers and "transfer-encoding" in headers:
                raise HttpError(400, "the request has two lengths.", hint="Send Content-Length or Transfer-Encoding.")
            self._check_origin(scope, headers)
            context.caller = self._identify(scope, headers)
            if not self._trusts(headers):
                context.caller = replace(context.caller, may_manage=False)
            check_proxy_loop(headers)
            if int(headers.get("content-length", 0)) > _MAX_BODY:
                raise _too_large()
            await self._app(scope, _limit_body(receive), send)
        except (Exception, asyncio.CancelledError) as error:
            if context.status:  # the response has begun
                raise
            response = error_response(scope["path"], explain(error))
            if "transfer-encoding" in headers:  # where the next request begins may be in doubt
                response.headers["connection"] = "close"
            await response(scope, receive, send)

    def _check_origin(self, scope: Scope, headers: Mapping[str, str]) -> None:
        rules = self._rules
        host = headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if rules.hosts is not None and name.lower() not in rules.hosts and not _is_unix(scope):
            raise HttpError(403, "the host name in the request is not allowed.", hint="Allow it with --allow-host.")
        if not self._trusts(headers) and not LOCAL_ORIGINS.fullmatch(headers["origin"]):
            raise HttpError(403, "requests from this origin are not allowed.", hint="Allow it with --allow-origin.")

    def _trusts(self, headers: Mapping[str, str]) -> bool:
        """Whether the request comes from no web page, from a page of this server, or from an origin that the rules
        list.
        """
        origin = headers.get("origin")
        is_own = origin is None or origin.partition("://")[2] == headers.get("host", "")
        return is_own or bool({origin, "*"} & self._rules.origins)

    def _identify(self, scope: Scope, headers: Mapping[str, str]) -> Caller:
        """Return who sends a request. Raises HttpError (401) if its key is missing or wrong and the path needs one."""
        if self._rules.keys is None:
            # Behind a proxy on this machine it comes from X-Forwarded-For, so it may be any text.
            host = scope["client"][0] if scope.get("client") else ""
            is_local = _is_unix(scope) or is_loopback(host.removeprefix("::ffff:"))
            return Caller(may_manage=is_local, remembers=is_local)
        scheme, _, key = headers.get("authorization", "").strip().partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        caller = self._rules.keys().get(hash_key(key))
        if caller is None and scope["path"] not in _OPEN:
            raise HttpError(401, "the API key is missing or wrong.", hint="Send the header Authorization: Bearer KEY.")
        return caller or Caller()


def _to_origin_form(scope: Scope) -> Scope:
    """`scope` with the path alone if the request line has a whole address, as proxies send it.

    The host in that line counts, and not the header's (RFC 9112, 3.2.2).
    """
    scheme, marks, rest = scope["path"].partition("://")
    if not marks or scheme.lower() not in ("http", "https"):
        return scope
    authority, _, path = rest.partition("/")
    headers = [each for each in scope["headers"] if each[0] != b"host"]
    return {**scope, "path": f"/{path}", "headers": [(b"host", authority.encode("latin-1", "replace")), *headers]}


def _too_large() -> HttpError:
    return HttpError(413, f"the body is larger than {_MAX_BODY:,} bytes.")


def _limit_body(receive: Receive) -> Receive:
    """Return a `receive` that raises HttpError (413) for a body of more than _MAX_BODY bytes."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > _MAX_BODY:
            raise _too_large()
        return message

    return receive_limited


def _is_unix(scope: Scope) -> bool:
    """Whether a request came over a Unix socket, which has no port. Browsers cannot connect to one."""
    server = scope.get("server")
    return server is not None and server[1] is None


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # also a key of TOML without quotes
_LOG = logging.getLogger("edgespec.server")


class KeyFile:
    """The keys of a file, which is read again when it changes: TOML with a table for each, [NAME],
    sha256 = "64 hexadecimal digits", and perhaps manage = true and memory = true.

    It holds hashes only, so it need not be kept secret; but whoever can write it can let himself in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = ()  # None while the file cannot be read
        self._keys = read_keys(path)
        if not self._keys:
            raise InvalidRequest(f"'{path}' has no key.", hint=f"Make one: edgespec key add NAME --file {path}")

    def read(self) -> Mapping[bytes, Caller]:
        """The keys. A file that cannot be read any more is reported in the log; the keys read before stay valid."""
        try:
            status = self._path.stat()
            if (stamp := (status.st_mtime_ns, status.st_size, status.st_ino)) != self._stamp:
                self._stamp = stamp
                self._keys = read_keys(self._path)
        except OSError as error:
            if self._stamp is not None:  # else it was reported when the file went
                self._stamp = None
                _LOG.error("%s cannot be read: %s. The keys read before stay valid.", self._path, reason_of(error))
        except InvalidRequest as error:
            _LOG.error("%s The keys read before stay valid.", error)
        return self._keys


def read_keys(path: Path) -> dict[bytes, Caller]:
    """The callers of a file by the hashes of their keys. Raises InvalidRequest."""
    hint = f"`edgespec key add NAME --file {path}` writes such entries."
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            tables = parse_toml(file.read())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {reason_of(error)}.", hint=hint) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequest(f"other users can write {path}.", hint=f"Run: chmod 600 {path}")
    keys: dict[bytes, Caller] = {}
    for name, table in tables.items():
        _check_name(name)
        try:
            entry = _Entry.model_validate(table)
        except ValidationError as error:
            fault = f"{path}: [{name}] is no entry of a key ({describe_fault(error, table)})."
            raise InvalidRequest(fault, hint=hint) from error
        keys[bytes.fromhex(entry.sha256)] = Caller(name, may_manage=entry.manage, remembers=entry.memory)
    return keys


class _Entry(BaseModel):
    """The table of a key."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    manage: bool = False
    memory: bool = False


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == ONLY_KEY:
        hint = f"Use letters, digits, - and _, at most 64 of them; {ONLY_KEY} is the name of the key of --api-key."
        raise InvalidRequest(f"a key cannot have the name '{name[:100]}'.", hint=hint)


def add_key(path: Path, name: str, *, may_manage: bool = False, remembers: bool = False) -> str:
    """Append the hash of a new key to a file, and return the key, which no file holds. A file that does not exist is
    created, for its owner only.

    Raises InvalidRequest for a name that is taken or not allowed and for a damaged file, and CacheError if the file
    cannot be written.
    """
    _check_name(name)
    keys = read_keys(path) if path.exists() else {}
    if name in {each.name for each in keys.values()}:
        hint = f"Choose another name, or first: edgespec key rm {name}"
        raise InvalidRequest(f"'{path}' has a key '{name}' already.", hint=hint)
    key = f"sk-edgespec-{secrets.token_urlsafe(32)}"  # clients and scanners for secrets expect its beginning
    flags = {"manage": may_manage, "memory": remembers}
    lines = [f"[{name}]", f'sha256 = "{hash_key(key).hex()}"', *(f"{flag} = true" for flag in flags if flags[flag])]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = f"{path.read_text(encoding='utf-8')}\n" if path.exists() else ""
        write_private(path.resolve(), before + "\n".join(lines) + "\n")
    except OSError as error:
        raise CacheError(f"cannot write {path}: {reason_of(error)}.", hint="Choose another --file.") from error
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove the table of a key; the rest of the file stays as it is. Raises InvalidRequest, CacheError."""
    names = {each.name for each in read_keys(path).values()}
    try:
        text = path.read_text(encoding="utf-8")
        rest = re.sub(rf"(?ms)^\[{re.escape(name)}\][^\n]*\n.*?(?=^\[|\Z)", "", text)
        if name not in names or set(parse_toml(rest.encode())) != names - {name}:
            hint = f"It has: {', '.join(sorted(names)) or 'none'}. An entry in another form is to be removed by hand."
            raise InvalidRequest(f"'{path}' has no key '{name}' in a line [{name}].", hint=hint)
        write_private(path.resolve(), rest)
    except OSError as error:
        raise CacheError(f"cannot write {path}: {reason_of(error)}.", hint="Check its permissions.") from error
