"""Routes whose errors are responses in the format of their interface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.server.http import error_response, hide_internal_error

Handler = Callable[[Request], Awaitable[Response]]


def post(path: str, handler: Handler) -> Route:
    return Route(path, catch_errors(handler), methods=["POST"])


def catch_errors(handler: Handler) -> Handler:
    """`handler`, with its errors as responses in the format of the interface."""

    @wraps(handler)
    async def catch(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - a bug is logged and must not stop the server
            return error_response(request.url.path, hide_internal_error(error))

    return catch
