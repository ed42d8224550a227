"""The web page at /: a conversation with the models, and the state of the server."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
PAGE_PATHS = frozenset(_FILES)
"""The paths of the page, which hold nothing secret."""


def page_routes() -> list[Route]:
    """The routes of `PAGE_PATHS`."""
    return [Route(path, get_file) for path in sorted(PAGE_PATHS)]


async def get_file(request: Request) -> Response:
    """The file of the page at the request's path."""
    found = _FILES[request.url.path.rstrip("/") or "/"]
    kind = _TYPES[found.name.split(".")[-1]]
    return Response(found.read_text(encoding="utf-8"), media_type=kind, headers=_HEADERS)
