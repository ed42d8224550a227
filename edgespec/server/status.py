"""/health, /metrics and /props."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from time import monotonic
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec import __version__
from edgespec.controller.acceptance import AcceptanceRecord
from edgespec.hub.reference import shorten_names
from edgespec.server.metrics import ServerMetrics
from edgespec.server.model_slot import ModelSlot
from edgespec.server.models import Models
from edgespec.server.remote_slot import RemoteSlot


def status_routes(models: Models, metrics: ServerMetrics) -> list[Route]:
    """The routes that report the state of the server."""

    async def get_health(_request: Request) -> Response:
        slots = models.slots.values()
        stalled = sum(slot.is_stalled for slot in slots)
        status = "stalled" if stalled else "loading" if models.is_preloading else "ok"
        counts = {name: sum(slot.state == name for slot in slots) for name in ("loaded", "loading")}
        state = {
            "status": status,
            "version": __version__,
            "loaded_models": counts["loaded"],
            "loading_models": counts["loading"],
            "stalled_models": stalled,
        }
        return JSONResponse(state, 200 if status == "ok" else 503)

    async def get_metrics(_request: Request) -> Response:
        waiting = {slot.name: slot.limiter.waiting for slot in models.all}
        silent_s = {slot.name: slot.silent_s for slot in models.slots.values()}
        return Response(metrics.format_prometheus(waiting, silent_s), media_type=CONTENT_TYPE_LATEST)

    async def get_props(_request: Request) -> Response:
        states = [_describe_slot(slot, metrics.records(slot.name)) for slot in models.slots.values()]
        states += [_describe_remote(slot) for slot in models.remotes.values()]
        return JSONResponse({"version": __version__, "models": states, "recent": metrics.recent()})

    return [
        Route("/health", get_health),
        Route("/metrics", get_metrics),
        Route("/props", get_props),
    ]


def _describe_slot(slot: ModelSlot, records: Mapping[str, AcceptanceRecord]) -> dict[str, Any]:
    """The state of one model, in the keys of /props."""
    state: dict[str, Any] = {
        "name": slot.name,
        "state": slot.state,
        "is_open": slot.model_info is not None,
        "is_busy": slot.is_busy,
        "answering": slot.limiter.active,
        "waiting": slot.limiter.waiting,
        "is_stalled": slot.is_stalled,
        "silent_seconds": slot.silent_s,
        "idle_seconds": round(monotonic() - slot.used_s, 1),
        "keep_alive_seconds": _finite(slot.keep_alive_s),
    }
    if (model_info := slot.model_info) is not None:
        state |= {
            "backend": model_info.backend,
            "draft": model_info.draft,
            "context_size": model_info.context_size,
            "has_chat_template": model_info.chat_template is not None,
            "answers_at_once": model_info.max_concurrency,
            "shares_forwards": model_info.no_batching_reason is None,
            "why_not": model_info.no_batching_reason,
            "plain_tokens_per_second": model_info.plain_speed,
            "resident_bytes": slot.resident,
            "unloads_in_seconds": _finite(slot.unloads_in_s),
            "drafters": [
                {
                    "name": name,
                    "label": shorten_names(model_info.drafters.get(name, name)),
                    "answers": record.answers,
                    "acceptance": record.share,
                    "recent_acceptance": record.recent,
                }
                for name, record in records.items()
            ],
        }
    return state


def _describe_remote(slot: RemoteSlot) -> dict[str, Any]:
    """The state of a model of another server, in the keys of /props."""
    return {
        "name": slot.name,
        "state": "remote",
        "is_open": True,
        "is_busy": slot.is_busy,
        "answering": slot.limiter.active,
        "waiting": slot.limiter.waiting,
        "is_stalled": False,
        "silent_seconds": 0.0,
        "idle_seconds": round(monotonic() - slot.used_s, 1),
        "keep_alive_seconds": None,
        "backend": "openai",
        "draft": "",
        "context_size": slot.context_size,
        "has_chat_template": True,
        "answers_at_once": slot.limiter.max_concurrency,
        "resident_bytes": 0,
        "unloads_in_seconds": None,
        "is_reachable": slot.state.is_reachable,
        "last_error": slot.state.failure,
        "owned_by": slot.state.owner,
    }


def _finite(seconds: float) -> float | None:
    """Seconds in JSON; None: without end."""
    return round(seconds, 1) if isfinite(seconds) else None
