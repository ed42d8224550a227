"""RemoteClient: HTTP requests to another server with OpenAI's interface."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx

from edgespec import __version__
from edgespec.errors import EdgespecError
from edgespec.server.hops import format_via
from edgespec.server.http import dump_json
from edgespec.server.remote_errors import (
    CHECK_URL,
    RemoteFailure,
    explain_error,
    explain_failure,
    explain_status,
    find_error,
)
from edgespec.server.remote_model import RemoteModel
from edgespec.sockets import keep_alive

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

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`, which begins with a slash."""
        return await self._read("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that answers `body`."""
        return await self._read("POST", path, body)

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

    async def _read(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        async with self._send(method, path, body) as response:
            return self._parse(await response.aread(), response)

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
