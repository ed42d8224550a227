"""/health, /metrics, /props, and the page for people at /."""

from __future__ import annotations

from importlib.resources import files
from time import monotonic
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from edgespec import __version__
from edgespec.server.models import Models, Room
from edgespec.server.tally import Tally

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"


def status_routes(models: Models, tally: Tally) -> list[Route]:
    """What tells how the server does."""

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def metrics(_request: Request) -> Response:
        waiting = {room.name: room.turns.waiting for room in models.rooms.values()}
        return Response(tally.exposition(waiting), media_type=CONTENT_TYPE_LATEST)

    async def props(_request: Request) -> Response:
        return JSONResponse({
            "version": __version__,
            "models": [_told(room) for room in models.rooms.values()],
            "recent": tally.recent(),
        })  # fmt: skip

    async def page(_request: Request) -> Response:
        return HTMLResponse(_asset("page.html"), headers={"content-security-policy": _POLICY})

    async def script(_request: Request) -> Response:
        return Response(_asset("page.js"), media_type="text/javascript")

    async def style(_request: Request) -> Response:
        return Response(_asset("page.css"), media_type="text/css")

    return [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/props", props),
        Route("/", page),
        Route("/page.js", script),
        Route("/page.css", style),
    ]


def _told(room: Room) -> dict[str, Any]:
    """What is known of one model."""
    told: dict[str, Any] = {"name": room.name, "is_open": room.standing is not None, "is_busy": room.is_busy,
                            "answering": room.turns.inside, "waiting": room.turns.waiting,
                            "idle_seconds": round(monotonic() - room.used_s, 1)}  # fmt: skip
    if (standing := room.standing) is not None:
        told |= {
            "backend": standing.backend,
            "draft": standing.draft,
            "context_size": standing.context_size,
            "answers_at_once": standing.at_once,
            "shares_forwards": standing.unshared is None,
            "why_not": standing.unshared,
            "plain_tokens_per_second": standing.plain_speed,
            "resident_bytes": room.resident,
        }
    return told


def _asset(name: str) -> str:
    return files("edgespec.server").joinpath(name).read_text(encoding="utf-8")
