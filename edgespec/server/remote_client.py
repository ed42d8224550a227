"""RemoteClient: HTTP requests to another server with OpenAI's interface."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from edgespec import __version__
from edgespec.errors import EdgespecError, InvalidRequest, PromptTooLong, reason_of
from edgespec.proxies import is_on_this_machine, open_client
from edgespec.server.fields import describe_fault
from edgespec.server.http import HttpError, dump_json, format_via
from edgespec.sockets import keep_alive

_KEY = re.compile(r"[ -~]+")


def _check_url(text: str) -> str:
    """Complete the URL: one without a path gets OpenAI's, /v1."""
    try:
        url = httpx.URL(text)
        is_sound = url.scheme in ("http", "https") and bool(url.host) and (url.port or 1) < 2**16
    except (ValueError, httpx.InvalidURL):  # of a host that is no name
        is_sound = False
    if not is_sound or url.userinfo or url.query or url.fragment or any(each.isspace() for each in text):
        raise ValueError("it is not an http or https address of a server, without a name, a password and a query")
    return str(url.copy_with(path=url.path.rstrip("/") or "/v1"))


def _check_variable(variable: str) -> str:
    """Require an environment variable that holds a key. Its name is not repeated: it may be the key itself."""
    if not _KEY.fullmatch(os.environ.get(variable, "").strip()):
        raise ValueError("it names no environment variable that is set and holds a key")
    return variable


class RemoteModel(BaseModel):
    """A model of another server.

    url       address of OpenAI's interface there, without a slash at the end
    model     its name there
    key_env   the environment variable with the key of that server; None if it needs none
    parallel  requests that are sent at once
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["openai"] = "openai"
    url: Annotated[str, AfterValidator(_check_url)]
    model: Annotated[str, Field(min_length=1)]
    key_env: Annotated[str, AfterValidator(_check_variable)] | None = None
    parallel: Annotated[int, Field(ge=1, le=4096)] = 64

    @property
    def key(self) -> str | None:
        return os.environ[self.key_env].strip() if self.key_env is not None else None

    @property
    def sends_plain_key(self) -> bool:
        """Whether the key crosses a network as plain text."""
        is_plain = urlsplit(self.url).scheme == "http"
        return self.key_env is not None and is_plain and not is_on_this_machine(self.url)


def read_model(name: str, table: Mapping[str, Any], hint: str) -> RemoteModel:
    """The model of a table, asked for as the table's `name` unless it says otherwise. Raises InvalidRequest."""
    fields = {"model": name, **{key.replace("-", "_"): value for key, value in table.items()}}
    try:
        return RemoteModel(**fields)
    except ValidationError as error:
        raise InvalidRequest(f"[{name}]: {describe_fault(error, fields)}.", hint=hint) from error


_NO_KEY = (401, 403)
_PASSED = (501, 503, 504, 508)  # of 500 and more; llama-server has 501 for what it was not started for
_MAX_MESSAGE = 1000  # characters
_MAX_ANSWER, _MAX_EVENT = 32 * 2**20, 4 * 2**20  # bytes of a whole answer, and of one event of a stream
_OVERFLOW = re.compile(r"maximum context length (?:is|of) ([\d,]+) tokens\D+([\d,]+)")  # vLLM's and OpenAI's words
_SECONDS = re.compile(r"[0-9]{1,6}")
CHECK_URL = "Check url in its table of the configuration; most end with /v1."


class RemoteFailure(HttpError):
    """The other server cannot serve any request."""

    def __init__(self, name: str, what: str, hint: str = CHECK_URL) -> None:
        super().__init__(502, f"the server behind '{name}' {what}.", hint=hint)


class Unreachable(RemoteFailure):
    """There is no connection to the other server, or none that lasted."""


def explain_error(
    name: str, model: RemoteModel, status: int, body: Any, headers: Mapping[str, str] | None = None
) -> EdgespecError:
    """The error that another server has told in the JSON `body`. `status`: that of the response, or the one that an
    event names. A refusal may quote the request, so its text is for the caller and not for the log.
    """
    where = f"the server behind '{name}'"
    if status in _NO_KEY:  # in own words: the other's may hold a part of the right key
        message = f"{where} refuses its key; set {model.key_env or 'key_env in its table of the configuration'}."
        return HttpError(502, message, hint="Then restart the server.")
    if (told := find_error(body)) is None:
        return RemoteFailure(name, f"answers with status {status} and not as OpenAI's interface does")
    message = _clean(str(told.get("message") or "no reason"), model)
    if (overflow := _read_overflow(told, message)) is not None:
        return overflow
    after = (headers or {}).get("retry-after", "")
    return HttpError(
        status if 400 <= status < 500 or status in _PASSED else 502,
        f"{where} answers: {message}.",
        hint="Change the request, or try again later.",
        log_message=f"{where} answers with status {status}.",
        retry_after_s=int(after) if _SECONDS.fullmatch(after) else None,
    )


def find_error(value: Any) -> dict[str, Any] | None:
    """The object of an error in a JSON value, in any of the forms that servers have; None if there is none."""
    if not isinstance(value, dict):
        return None
    error = value.get("error") or value.get("detail") or value
    return error if isinstance(error, dict) else {"message": error}


def _read_overflow(told: Mapping[str, Any], message: str) -> PromptTooLong | None:
    """Recognize a prompt that exceeds the context, with the numbers by which clients know it."""
    n_prompt, n_context = told.get("n_prompt_tokens"), told.get("n_ctx")  # llama-server's and edgespec's
    if not (isinstance(n_prompt, int) and isinstance(n_context, int)):
        found = _OVERFLOW.search(message)
        if found is None:
            return None
        n_context, n_prompt = (int(number.replace(",", "")) for number in found.groups())
    text = f"the prompt has {n_prompt:,} tokens, the context of the other server {n_context:,}."
    return PromptTooLong(text, n_prompt=n_prompt, n_context=n_context)


def _clean(message: str, model: RemoteModel) -> str:
    """Another server's words on one line, without its key and its address."""
    text, parts = " ".join(message.split()), urlsplit(model.url)
    for secret in (model.key, parts.netloc, parts.hostname):
        text = text.replace(secret, "[...]") if secret else text
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
        self._http = open_client(
            httpx.AsyncClient,
            model.url,
            headers={**key, "accept-encoding": "identity", "user-agent": f"edgespec/{__version__}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_REUSE_S),
        )

    async def read(self, path: str, seconds: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object at `path`, which begins with a slash, or the one that answers `body`, within `seconds`."""
        try:
            async with asyncio.timeout(seconds), self._send("GET" if body is None else "POST", path, body) as response:
                return self._parse(await self._read_all(response), response)
        except TimeoutError as error:
            raise self.late() from error

    def late(self) -> HttpError:
        """The error of an answer that has not come in time."""
        message = f"the server behind '{self._name}' did not answer in time."
        return HttpError(504, message, hint="Try again, or ask for less.")

    async def chunks(self, path: str, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events that answer `body`, in batches as they arrive. Closing it closes the request.

        A server that does not stream has its whole answer as the only event.
        """
        async with self._send("POST", path, body) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                yield [self._parse(await self._read_all(response), response)]
                return
            rest = b""
            async for data in response.aiter_raw():
                *lines, rest = (rest + data).split(b"\n")
                self._check_size(rest, _MAX_EVENT)
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
        headers = {"via": format_via(), "content-type": "application/json"}
        try:
            async with self._http.stream(
                method, f"{self._model.url}{path}", content=content, headers=headers, extensions={"trace": _set_probes}
            ) as response:
                if response.status_code != 200:
                    told = _load(await self._read_all(response))
                    raise explain_error(self._name, self._model, response.status_code, told, response.headers)
                yield response
        except (httpx.HTTPError, OSError) as error:
            is_made = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError | OSError)
            what = "ended the connection" if is_made else "cannot be reached"
            raise Unreachable(self._name, f"{what} ({_clean(reason_of(error), self._model)})") from error

    async def _read_all(self, response: httpx.Response) -> bytes:
        found = bytearray()
        async for data in response.aiter_bytes():
            found += data
            self._check_size(found, _MAX_ANSWER)
        return bytes(found)

    def _check_size(self, data: bytes | bytearray, limit: int) -> None:
        if len(data) > limit:
            raise RemoteFailure(self._name, f"sends more than {limit // 2**20} MiB at once")

    def _parse(self, data: bytes, response: httpx.Response) -> dict[str, Any]:
        """An object of a response. Raises the error that it holds."""
        value = _load(data)
        if not isinstance(value, dict):
            kind = response.headers.get("content-type", "").split(";")[0][:50] or "no type"
            raise RemoteFailure(self._name, f"answers with {kind}, not as OpenAI's interface does")
        if error := value.get("error"):
            code = error.get("code") if isinstance(error, dict) else None
            raise explain_error(self._name, self._model, code if isinstance(code, int) else 502, value)
        return value


def _load(data: bytes) -> Any:
    """The JSON value in `data`; None if it is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(data, parse_constant=lambda _: None)  # NaN is not JSON
    return None


async def _set_probes(event: str, info: Mapping[str, Any]) -> None:
    """Turn on TCP keep-alive probes for a new connection. httpx calls this with each event of a request."""
    if event == "connection.connect_tcp.complete":
        keep_alive(info["return_value"].get_extra_info("socket"), **_PROBES)
