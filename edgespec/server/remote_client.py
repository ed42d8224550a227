"""RemoteClient: HTTP requests to another server with OpenAI's interface."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from edgespec import __version__
from edgespec.errors import EdgespecError, InvalidRequest, PromptTooLong
from edgespec.server.http import HttpError, dump_json, format_via
from edgespec.sockets import is_loopback, keep_alive

# RemoteModel: a model of another server with OpenAI's interface, and how its table in a configuration is checked.


MAX_CONCURRENCY = 64
"""Requests at once, unless a table says otherwise."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_KEY = re.compile(r"[ -~]+")
_URL_HINT = 'Write the address that OpenAI\'s clients take, such as url = "https://host:8000/v1".'


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model of another server.

    url              of OpenAI's interface there, without a slash at the end
    model            its name there
    key_env          the environment variable with the key of that server; None where it needs none
    max_concurrency  requests that are sent at once
    remembers        whether the memory of another edgespec may keep the texts of this server's own user

    Raises InvalidRequest for values that cannot be used.
    """

    url: str
    model: str
    key_env: str | None = None
    max_concurrency: int = MAX_CONCURRENCY
    remembers: bool = True
    key: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _check_url(self.url))
        if not self.model:
            raise InvalidRequest("model is empty.", hint="Write the name that the other server uses.")
        if self.key_env is not None:
            object.__setattr__(self, "key", _read_key(self.key_env))

    @property
    def sends_plain_key(self) -> bool:
        """Whether the key crosses a network as plain text."""
        parts = urlsplit(self.url)
        return self.key is not None and parts.scheme == "http" and not is_loopback(parts.hostname or "")


def _check_url(url: str) -> str:
    """The URL; one without a path gets OpenAI's, /v1. Raises InvalidRequest."""
    try:
        parsed = httpx.URL(url)
        is_sound = parsed.scheme in ("http", "https") and bool(parsed.host) and (parsed.port or 1) < 2**16
    except (ValueError, httpx.InvalidURL):  # of a host that is no name
        is_sound = False
    if not is_sound or parsed.query or parsed.fragment or any(each.isspace() for each in url):
        raise InvalidRequest("url is not an http or https address of a server.", hint=_URL_HINT)
    if parsed.userinfo:
        raise InvalidRequest("url holds a name or a password.", hint="Put the key into a variable and set key_env.")
    return str(parsed.copy_with(path=parsed.path.rstrip("/") or "/v1"))


def _read_key(variable: str) -> str:
    if not _VARIABLE.fullmatch(variable):
        raise InvalidRequest(
            "key_env is not the name of an environment variable.",
            hint='Put the key into a variable such as BIG_KEY, and write key_env = "BIG_KEY".',
        )
    key = os.environ.get(variable, "").strip()
    if not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"the environment variable {variable} is not set, or holds no key.", hint=f"Set it: export {variable}=..."
        )
    return key


# What clients are told when another server fails or refuses: one sentence, without its address and without a key.
#
# A refusal may quote the request, so its text is for the caller and not for the log.


_NO_KEY = (401, 403)
_MAX_MESSAGE = 1000  # characters
_OVERFLOW = re.compile(r"maximum context length (?:is|of) ([\d,]+) tokens\D+([\d,]+)")  # vLLM's and OpenAI's words
CHECK_URL = "Check url in its table of the configuration; most end with /v1."
_AGAIN = "Try again later."


class RemoteFailure(HttpError):
    """The other server cannot serve any request."""

    def __init__(self, name: str, what: str, hint: str) -> None:
        super().__init__(502, f"the server behind '{name}' {what}.", hint=hint)


class Unreachable(RemoteFailure):
    """There is no connection to the other server, or none that lasted."""


class RemoteRefusal(HttpError):
    """The other server refuses a request; the message is its own, which may quote the request."""


_FAILURES: tuple[tuple[type[Exception], str, str], ...] = (  # the first kind that an error is, or was caused by
    (ssl.SSLError, "does not speak TLS as it should", CHECK_URL),
    (socket.gaierror, "cannot be reached (its name is not known)", CHECK_URL),
    (httpx.ConnectTimeout, "cannot be reached (no answer)", f"Start it. {CHECK_URL}"),
    (httpx.ProxyError, "cannot be reached through the proxy", "Check HTTPS_PROXY and NO_PROXY."),
    (httpx.ConnectError, "cannot be reached", f"Start it. {CHECK_URL}"),
    (httpx.NetworkError, "ended the connection", _AGAIN),
    (httpx.RemoteProtocolError, "ended the connection", _AGAIN),
    (Exception, "does not answer as HTTP", CHECK_URL),
)


def explain_failure(name: str, error: httpx.HTTPError | OSError) -> Unreachable:
    """The error of a connection that cannot be made, or that broke."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for each in causes:
        if isinstance(each, ssl.SSLCertVerificationError):
            reason = each.verify_message.split(",")[0].rstrip(".").lower()  # the rest names the host
            hint = "Trust its certificate with SSL_CERT_FILE, or use its right name in url."
            return Unreachable(name, f"has a certificate that is not trusted ({reason})", hint)
    fits = (rest for kind, *rest in _FAILURES if any(isinstance(each, kind) for each in causes))
    return Unreachable(name, *next(fits))


def explain_status(name: str, model: RemoteModel, response: httpx.Response, body: bytes) -> EdgespecError:
    """The error of a response that is not 200. `body` is its body."""
    status, told = response.status_code, read_error(body)
    if status in _NO_KEY:
        return _explain_key(name, model)
    if status == 508:
        return HttpError(508, f"the url of '{name}' leads back to this server.", hint="Correct it in its table.")
    if 300 <= status < 400:
        return RemoteFailure(name, "redirects to another address", "Set url to the address where it leads.")
    if told is None:
        return RemoteFailure(name, f"answers with status {status} and not as OpenAI's interface does", CHECK_URL)
    return explain_error(name, model, status, told, response.headers)


def explain_error(
    name: str, model: RemoteModel, status: int, told: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> EdgespecError:
    """The error that another server has told. `status`: that of the response, or the one that an event names."""
    if status in _NO_KEY:
        return _explain_key(name, model)
    message, where = _clean(str(told.get("message") or "no reason"), model), f"the server behind '{name}'"
    if (overflow := _read_overflow(told, message)) is not None:
        return overflow
    if status == 429:
        after = (headers or {}).get("retry-after", "")
        seconds = int(after) if after.isascii() and after.isdecimal() and len(after) < 7 else 1
        hint = f"Try again in {seconds} seconds."
        return HttpError(429, f"{where} is busy.", hint=hint, retry_after_s=seconds)
    if 400 <= status < 500 or status == 501:  # which llama-server gives for what it was not started for
        hint, log_message = (
            f"(The server behind '{name}' says so.)",
            f"{where} refuses the request with status {status}.",
        )
        return RemoteRefusal(status, f"{message}.", hint=hint, log_message=log_message)
    log_message = f"{where} failed with status {status}."
    status = status if status in (503, 504) else 502
    return HttpError(status, f"{where} failed: {message}.", hint=_AGAIN, log_message=log_message)


def _explain_key(name: str, model: RemoteModel) -> HttpError:
    """Say that this server's key is missing or wrong, in own words: the other's may hold a part of the right key."""
    fix = f"set {model.key_env}" if model.key_env else "set key_env in its table of the configuration"
    what = "refuses its key" if model.key_env else "asks for a key"
    return HttpError(502, f"the server behind '{name}' {what}; {fix}.", hint="Then restart the server.")


def read_error(body: bytes) -> dict[str, Any] | None:
    """The object of an error with its `message`, in any of the forms that servers have; None where there is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return find_error(value)


def find_error(value: Any) -> dict[str, Any] | None:
    """Find in a JSON value what `read_error` finds in a body."""
    if not isinstance(value, dict):
        return None
    error = value.get("error") or value.get("detail") or (value if isinstance(value.get("message"), str) else None)
    if isinstance(error, list) and error and isinstance(error[0], dict):  # FastAPI's
        error = {"message": error[0].get("msg")}
    if isinstance(error, str):
        error = {"message": error}
    return error if isinstance(error, dict) else None


def _read_overflow(told: Mapping[str, Any], message: str) -> PromptTooLong | None:
    """Recognize a prompt that exceeds the context, with the numbers by which clients know it."""
    n_prompt, n_context = told.get("n_prompt_tokens"), told.get("n_ctx")  # llama-server's and edgespec's
    if not (isinstance(n_prompt, int) and isinstance(n_context, int)):
        found = _OVERFLOW.search(message)
        if found is None:
            return None
        n_context, n_prompt = (int(number.replace(",", "")) for number in found.groups())
    text = f"the prompt has {n_prompt:,} tokens, the context of the other server {n_context:,}."
    return PromptTooLong(text, hint="Shorten it.", n_prompt=n_prompt, n_context=n_context)


def _clean(message: str, model: RemoteModel) -> str:
    """Another server's words on one line, without its key and its address."""
    text = " ".join(message.split())
    for secret in (model.key, urlsplit(model.url).netloc):
        text = text.replace(secret, "...") if secret else text
    return text[:_MAX_MESSAGE].rstrip(".")


_CONNECT_S = 10.0
_REUSE_S = 3.0  # servers close idle connections, some after 5 seconds
_DONE = b"[DONE]"
_PROBES = {"idle_s": 15, "interval_s": 10, "probes": 4}  # a machine that is gone is known within a minute


class RemoteClient:
    """Calls the server of a model. Every method raises EdgespecError for what the caller shall be told.

    Requests hold the key of that server and nothing of the caller's headers.
    """

    def __init__(self, name: str, model: RemoteModel) -> None:
        """`name`: by which errors call the model."""
        self._name = name
        self._model = model
        key = {"authorization": f"Bearer {model.key}"} if model.key else {}
        self._http = httpx.AsyncClient(
            headers={**key, "accept-encoding": "identity", "user-agent": f"edgespec/{__version__}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_REUSE_S),
        )

    async def read(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object at `path`, which begins with a slash, or the one that answers `body`."""
        async with self._send(method, path, body) as response:
            return self._parse(await response.aread(), response)

    async def chunks(self, path: str, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events that answer `body`, in batches as they arrive. Closing it closes the request.

        A server that does not stream has its whole answer as the only event.
        """
        async with self._send("POST", path, body) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                yield [self._parse(await response.aread(), response)]
                return
            rest = b""
            async for data in response.aiter_raw():
                *lines, rest = (rest + data).split(b"\n")
                found: list[dict[str, Any]] = []
                try:
                    for event in (line[5:].strip() for line in lines if line.startswith(b"data:")):
                        if event not in (_DONE, b""):
                            found.append(self._parse(event, response))
                except EdgespecError:
                    yield found  # what came before the error
                    raise
                yield found

    async def close(self) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[httpx.Response]:
        """The response to a request, with status 200 and an unread body."""
        content = None if body is None else dump_json(body)
        headers = {"via": format_via(), **({} if content is None else {"content-type": "application/json"})}
        try:
            async with self._http.stream(
                method, f"{self._model.url}{path}", content=content, headers=headers, extensions={"trace": _set_probes}
            ) as response:
                if response.status_code != 200:
                    raise explain_status(self._name, self._model, response, await response.aread())
                yield response
        except (httpx.HTTPError, OSError) as error:
            raise explain_failure(self._name, error) from error

    def _parse(self, data: bytes, response: httpx.Response) -> dict[str, Any]:
        """An object of a response. Raises the error that it holds."""
        try:
            value = json.loads(data, parse_constant=lambda _: None)  # NaN is not JSON
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            kind = response.headers.get("content-type", "").split(";")[0][:50] or "no type"
            raise RemoteFailure(self._name, f"answers with {kind}, not as OpenAI's interface does", CHECK_URL)
        if value.get("error") and (told := find_error(value)) is not None:
            code = told.get("code")
            raise explain_error(self._name, self._model, code if isinstance(code, int) else 502, told)
        return value


async def _set_probes(event: str, info: Mapping[str, Any]) -> None:
    """Turn on TCP's probes of a new connection. Called with each event of a request."""
    if event == "connection.connect_tcp.complete":
        keep_alive(info["return_value"].get_extra_info("socket"), **_PROBES)
