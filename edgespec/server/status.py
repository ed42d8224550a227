"""/health, /metrics, /props, and the status page at /."""

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
from edgespec.server.model_slot import ModelSlot
from edgespec.server.models import Models

_CONTENT_SECURITY_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"


def status_routes(models: Models, metrics: ServerMetrics) -> list[Route]:
    """The routes that report the state of the server."""

    async def get_health(_request: Request) -> Response:
        stalled = sum(slot.is_stalled for slot in models.slots.values())
        state = {"status": "stalled" if stalled else "ok", "version": __version__, "stalled_models": stalled}
        return JSONResponse(state, 503 if stalled else 200)

    async def get_metrics(_request: Request) -> Response:
        waiting = {slot.name: slot.limiter.waiting for slot in models.slots.values()}
        silent_s = {slot.name: slot.silent_s for slot in models.slots.values()}
        return Response(metrics.format_prometheus(waiting, silent_s), media_type=CONTENT_TYPE_LATEST)

    async def get_props(_request: Request) -> Response:
        states = [_describe_slot(slot) for slot in models.slots.values()]
        return JSONResponse({"version": __version__, "models": states, "recent": metrics.recent()})

    async def get_page(_request: Request) -> Response:
        return HTMLResponse(_read_asset("page.html"), headers={"content-security-policy": _CONTENT_SECURITY_POLICY})

    async def get_script(_request: Request) -> Response:
        return Response(_read_asset("page.js"), media_type="text/javascript")

    async def get_style(_request: Request) -> Response:
        return Response(_read_asset("page.css"), media_type="text/css")

    return [
        Route("/health", get_health),
        Route("/metrics", get_metrics),
        Route("/props", get_props),
        Route("/", get_page),
        Route("/page.js", get_script),
        Route("/page.css", get_style),
    ]


def _describe_slot(slot: ModelSlot) -> dict[str, Any]:
    """The state of one model, in the keys of /props."""
    state: dict[str, Any] = {
        "name": slot.name,
        "is_open": slot.model_info is not None,
        "is_busy": slot.is_busy,
        "answering": slot.limiter.active,
        "waiting": slot.limiter.waiting,
        "is_stalled": slot.is_stalled,
        "silent_seconds": slot.silent_s,
        "idle_seconds": round(monotonic() - slot.used_s, 1),
    }
    if (model_info := slot.model_info) is not None:
        state |= {
            "backend": model_info.backend,
            "draft": model_info.draft,
            "context_size": model_info.context_size,
            "answers_at_once": model_info.max_concurrency,
            "shares_forwards": model_info.no_batching_reason is None,
            "why_not": model_info.no_batching_reason,
            "plain_tokens_per_second": model_info.plain_speed,
            "resident_bytes": slot.resident,
        }
    return state


def _read_asset(name: str) -> str:
    return files("edgespec.server").joinpath(name).read_text(encoding="utf-8")
