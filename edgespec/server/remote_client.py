"""RemoteClient: HTTP requests to another server with OpenAI's interface."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from edgespec import __version__
from edgespec.errors import EdgespecError, InvalidRequest, PromptTooLong
from edgespec.server.http import Busy, HttpError, dump_json, format_via
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
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_sound = is_sound and bool(httpx.URL(url).host)  # what cannot be asked, such as a name that is no text
    except (ValueError, httpx.InvalidURL):
        is_sound = False
    if not is_sound or any(each.isspace() for each in url):
        raise InvalidRequest("url is not an http or https address.", hint=_URL_HINT)
    if "@" in parts.netloc:
        raise InvalidRequest("url holds a name or a password.", hint="Put the key into a variable and set key_env.")
    if parts.query or parts.fragment:
        raise InvalidRequest("url has more than a path.", hint=_URL_HINT)
    path = parts.path.rstrip("/") or "/v1"
    if path.endswith(("/completions", "/models", "/embeddings", "/responses", "/messages")):
        raise InvalidRequest("url names one path of the interface.", hint=_URL_HINT)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _read_key(variable: str) -> str:
    if not _VARIABLE.fullmatch(variable):
        raise InvalidRequest(
            "key_env is not the name of an environment variable.",
            hint='Put the key into a variable such as BIG_KEY, and write key_env = "BIG_KEY".',
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InvalidRequest(f"the environment variable {variable} is not set.", hint=f"Set it: export {variable}=...")
    if not _KEY.fullmatch(key):
        raise InvalidRequest(f"{variable} holds characters that no key has.", hint="Set it to the key alone.")
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
    """The other server refuses a request; the message is its own."""

    def __init__(self, name: str, status: int, message: str) -> None:
        super().__init__(status, message, hint=f"(The server behind '{name}' says so.)")
        self.log_message = f"the server behind '{name}' refuses the request with status {status}."


def explain_failure(name: str, error: httpx.HTTPError | OSError) -> Unreachable:
    """The error of a connection that cannot be made, or that broke."""
    causes = list(_causes(error))
    if found := next((each for each in causes if isinstance(each, ssl.SSLCertVerificationError)), None):
        reason = found.verify_message.split(",")[0].rstrip(".").lower()  # the rest names the host
        hint = "Trust its certificate with SSL_CERT_FILE, or use its right name in url."
        return Unreachable(name, f"has a certificate that is not trusted ({reason})", hint)
    if any(isinstance(each, ssl.SSLError) for each in causes):
        return Unreachable(name, "does not speak TLS as it should", CHECK_URL)
    if isinstance(error, httpx.ConnectTimeout):
        return Unreachable(name, "cannot be reached (no answer)", f"Start it. {CHECK_URL}")
    if isinstance(error, httpx.ProxyError):
        return Unreachable(name, "cannot be reached through the proxy", "Check HTTPS_PROXY and NO_PROXY.")
    if isinstance(error, httpx.ConnectError):
        return Unreachable(name, f"cannot be reached ({_name_cause(causes)})", f"Start it. {CHECK_URL}")
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError | httpx.CloseError):
        return Unreachable(name, "ended the connection", _AGAIN)
    return Unreachable(name, "does not answer as HTTP", CHECK_URL)


def explain_status(name: str, model: RemoteModel, response: httpx.Response, body: bytes) -> EdgespecError:
    """The error of a response that is not 200. `body` is the beginning of its body."""
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
    message = _clean(str(told.get("message") or "no reason"), model)
    if (overflow := _read_overflow(told, message)) is not None:
        return overflow
    if status == 429:
        after = (headers or {}).get("retry-after", "")
        seconds = int(after) if after.isascii() and after.isdecimal() and len(after) < 7 else 1
        hint = f"Try again in {seconds} seconds."
        return Busy(f"the server behind '{name}' is busy.", hint=hint, retry_after_s=seconds)
    if 400 <= status < 500 or status == 501:  # which llama-server gives for what it was not started for
        return RemoteRefusal(name, status, f"{message}.")
    failed = HttpError(status if status in (503, 504) else 502, f"the server behind '{name}' failed: {message}.",
                       hint=_AGAIN)  # fmt: skip
    failed.log_message = f"the server behind '{name}' failed with status {status}."
    return failed


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


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what has caused it."""
    yield error
    for each in getattr(error, "exceptions", ()):
        yield from _causes(each)
    if (cause := error.__cause__ or error.__context__) is not None:
        yield from _causes(cause)


def _name_cause(causes: list[BaseException]) -> str:
    if any(isinstance(each, socket.gaierror) for each in causes):
        return "its name is not known"
    number = next((each.errno for each in causes if isinstance(each, OSError) and each.errno), None)
    return os.strerror(number).lower() if number is not None else "no connection"


_CONNECT_S = 10.0
_REUSE_S = 3.0  # servers close idle connections, some after 5 seconds
_MAX_ERROR = 2**16  # bytes
_MAX_LINE = 2**24
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
            async with aclosing(self._lines(response)) as batches:
                async for lines in batches:
                    found: list[dict[str, Any]] = []
                    try:
                        for event in (line[5:].strip() for line in lines if line.startswith(b"data:")):
                            if event not in (_DONE, b""):
                                found.append(self._parse(event, response))
                    except EdgespecError:
                        if found:  # what came before the error
                            yield found
                        raise
                    if found:
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
                    raise explain_status(self._name, self._model, response, await _read_start(response))
                yield response
        except (httpx.HTTPError, OSError) as error:
            raise explain_failure(self._name, error) from error

    async def _lines(self, response: httpx.Response) -> AsyncGenerator[list[bytes], None]:
        """The lines of a body that are whole, in batches as they arrive."""
        rest = b""
        async for data in response.aiter_raw():
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE:
                raise RemoteFailure(self._name, f"sends events of more than {_MAX_LINE:,} bytes", "Ask for less.")
            if lines:
                yield lines
        if rest:
            yield [rest]

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


async def _read_start(response: httpx.Response) -> bytes:
    data = b""
    async for part in response.aiter_raw():
        data += part
        if len(data) > _MAX_ERROR:
            break
    return data


async def _set_probes(event: str, info: Mapping[str, Any]) -> None:
    """Turn on TCP's probes of a new connection. Called with each event of a request."""
    if event == "connection.connect_tcp.complete":
        keep_alive(info["return_value"].get_extra_info("socket"), **_PROBES)
