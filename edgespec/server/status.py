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
from edgespec.server.metrics import ServerMetrics
from edgespec.server.models import Models, ModelSlot

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"


def status_routes(models: Models, server_metrics: ServerMetrics) -> list[Route]:
    """What tells how the server does."""

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def metrics(_request: Request) -> Response:
        waiting = {slot.name: slot.limiter.waiting for slot in models.slots.values()}
        return Response(server_metrics.exposition(waiting), media_type=CONTENT_TYPE_LATEST)

    async def props(_request: Request) -> Response:
        return JSONResponse({
            "version": __version__,
            "models": [_told(slot) for slot in models.slots.values()],
            "recent": server_metrics.recent(),
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


def _told(slot: ModelSlot) -> dict[str, Any]:
    """What is known of one model."""
    told: dict[str, Any] = {"name": slot.name, "is_open": slot.model_info is not None, "is_busy": slot.is_busy,
                            "answering": slot.limiter.inside, "waiting": slot.limiter.waiting,
                            "idle_seconds": round(monotonic() - slot.used_s, 1)}  # fmt: skip
    if (model_info := slot.model_info) is not None:
        told |= {
            "backend": model_info.backend,
            "draft": model_info.draft,
            "context_size": model_info.context_size,
            "answers_at_once": model_info.max_concurrency,
            "shares_forwards": model_info.no_batching_reason is None,
            "why_not": model_info.no_batching_reason,
            "plain_tokens_per_second": model_info.plain_speed,
            "resident_bytes": slot.resident,
        }
    return told


def _asset(name: str) -> str:
    return files("edgespec.server").joinpath(name).read_text(encoding="utf-8")
