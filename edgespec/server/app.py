"""The ASGI application: its routes, what guards them, and its start and end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import isfinite
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgespec import __version__
from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.client.client import EngineClient
from edgespec.engine.events import SlotState
from edgespec.engine.model_info import ModelInfo
from edgespec.models.fit import Fit
from edgespec.models.short_names import shorten_names
from edgespec.server.anthropic import MessagesRequest
from edgespec.server.auth import LOCAL_ORIGINS, Guard, Rules, page_routes
from edgespec.server.fields import GenerationBody, LoadRequest, UnloadRequest
from edgespec.server.http import BodyRoute, GetRoute, JsonResponse, reject_path, respond_unless_disconnected
from edgespec.server.inputs import embedding_route, format_openai, token_routes
from edgespec.server.metrics import ServerMetrics
from edgespec.server.models import AnySlot, Models, generate, require_local
from edgespec.server.ollama import ollama_routes
from edgespec.server.openai import ChatRequest, CompletionRequest
from edgespec.server.record import AccessLog, request_context
from edgespec.server.remote import RemoteSlot
from edgespec.server.responses import ResponsesRequest
from edgespec.server.slots import ModelSlot

_GETS = {
    "/v1/models": "The models.",
    "/api/tags": "The models, as Ollama lists them.",
    "/api/ps": "The loaded models, as Ollama lists them.",
    "/api/version": "The version of Ollama's interface.",
    "/health": "Whether the server is up.",
    "/props": "The state of the models, and the last answers.",
    "/slots": "The KV caches of the loaded models.",
}
_ERRORS = {
    "400": "The request is not valid.",
    "401": "The API key is missing or wrong.",
    "403": "The host or the origin is not allowed.",
    "404": "The model is unknown.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many requests are waiting; see Retry-After.",
    "500": "The engine failed.",
    "503": "The model cannot be loaded now.",
}


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `routes` and of the paths in _GETS. The schemas of bodies come from the models
    that validate them.
    """
    bodies = {each.path: each for each in routes if isinstance(each, BodyRoute)}
    _, definitions = models_json_schema(
        [(route.kind, "validation") for route in bodies.values()], ref_template="#/components/schemas/{model}"
    )
    any_object = {"application/json": {"schema": {"type": "object"}}}
    errors = {status: {"description": text, "content": any_object} for status, text in _ERRORS.items()}
    paths: dict[str, Any] = {}
    for path, route in bodies.items():
        schema = {"$ref": f"#/components/schemas/{route.kind.__name__}"}
        stream = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
        is_streamed = "stream" in route.kind.model_fields and not path.endswith("_tokens")
        content = {**any_object, stream: {}} if is_streamed else any_object
        operation = {
            "summary": (route.kind.__doc__ or "").split("\n")[0],
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {"200": {"description": "The answer.", "content": content}, **errors},
        }
        paths[path] = {method.lower(): operation for method in route.methods or ()}
    for path, text in _GETS.items():
        answer = {"description": text, "content": any_object}
        paths[path] = {"get": {"summary": text, "responses": {"200": answer, **errors}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def status_routes(models: Models, metrics: ServerMetrics) -> list[Route]:
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
        memory = {
            slot.name: {"resident": slot.resident, "estimated": info.fit.needed if info.fit is not None else 0}
            for slot in models.slots.values()
            if (info := slot.model_info) is not None
        }
        text = metrics.format_prometheus(waiting, silent_s, await models.find_devices(), memory)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def get_props() -> dict[str, Any]:
        states = [_describe_slot(slot, metrics.records.get(slot.name, {})) for slot in models.all]
        return {"version": __version__, "models": states, "recent": metrics.recent()}

    async def get_slots(_request: Request) -> Response:
        found = [
            (slot, state)
            for slot in models.slots.values()
            for state in await models.ask(slot, EngineClient.slots) or ()
        ]
        return JsonResponse([_describe_cache(slot, state) for slot, state in found])

    return [
        Route("/health", get_health),
        Route("/slots", get_slots),
        Route("/metrics", get_metrics),
        GetRoute("/props", get_props),
    ]


def _describe_cache(slot: ModelSlot, state: SlotState) -> dict[str, Any]:
    """The state of one KV cache, in llama.cpp's keys if it has them."""
    return {
        "id": state.number,
        "model": slot.name,
        "n_ctx": slot.context_size,
        "is_processing": state.is_busy,
        "n_tokens": state.tokens,
        "n_prompt_tokens": state.prompt,
        "cache_lost_n": state.loss.tokens if state.loss is not None else 0,
        "cache_lost_reason": state.loss.reason if state.loss is not None else None,
    }


def _describe_slot(slot: AnySlot, records: Mapping[str, AcceptanceRecord]) -> dict[str, Any]:
    """The state of one model, in the keys of /props."""
    limiter = slot.limiter
    state: dict[str, Any] = {
        "name": slot.name,
        "state": slot.state,
        "is_busy": slot.is_busy,
        "answering": limiter.active,
        "waiting": limiter.waiting,
        "trained_context": slot.facts.trained_context if slot.facts is not None else None,
    }
    if isinstance(slot, RemoteSlot):
        return {
            **state,
            "is_open": True,
            "is_stalled": False,
            "silent_seconds": 0.0,
            "keep_alive_seconds": None,
            "backend": "openai",
            "draft": "",
            "context_size": slot.context_size,
            "has_chat_template": True,
            "answers_at_once": limiter.max_concurrency,
            "resident_bytes": 0,
            "unloads_in_seconds": None,
            "is_reachable": slot.is_reachable,
            "last_error": slot.failure,
            "owned_by": slot.owner,
        }
    model_info = slot.model_info
    state |= {
        "is_open": model_info is not None,
        "is_stalled": slot.is_stalled,
        "silent_seconds": slot.silent_s,
        "keep_alive_seconds": _finite(slot.keep_alive_s),
    }
    if model_info is not None:
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
            "estimated_bytes": _describe_memory(model_info.fit),
            "unloads_in_seconds": _finite(slot.unloads_in_s),
            "drafters": [_describe_drafter(model_info, name, record) for name, record in records.items()],
        }
    return state


def _describe_drafter(model_info: ModelInfo, name: str, record: AcceptanceRecord) -> dict[str, Any]:
    return {
        "name": name,
        "label": shorten_names(model_info.drafters.get(name, name)),
        "answers": record.answers,
        "acceptance": record.share,
        "recent_acceptance": record.recent,
    }


def _describe_memory(fit: Fit | None) -> dict[str, int] | None:
    """The memory that was estimated before loading, in bytes by part. `slot` is what one more slot would take, and
    `context_8192` what 8,192 more tokens of context would take in all slots. None for the toy runtime.
    """
    if fit is None:
        return None
    return {
        "weights": fit.target.weights,
        "kv": fit.target.kv,
        "scratch": fit.target.compute,
        "draft": fit.draft.total if fit.draft is not None else 0,
        "trees": fit.tree_cache.total if fit.tree_cache is not None else 0,
        "slot": fit.kv_for(fit.context),
        "context_8192": fit.caches * fit.kv_for(8192),
    }


def _finite(seconds: float) -> float | None:
    """`seconds`, rounded to tenths, as JSON can hold them: None for infinity."""
    return round(seconds, 1) if isfinite(seconds) else None


def model_routes(models: Models) -> list[Route]:
    async def get_model(request: Request) -> Response:
        return JsonResponse(models.describe(models.find(request.path_params["name"])))

    async def load_model(request: Request, body: LoadRequest) -> Response:
        slot = require_local(models.find(body.model))
        slot.apply_keep_alive(body.keep_alive)

        async def load() -> dict[str, Any]:
            async with models.turn(slot):
                return {"success": True}

        return await respond_unless_disconnected(request, load())

    async def unload_model(_request: Request, body: UnloadRequest) -> Response:
        slot = require_local(models.find(body.model))
        request_context().model = slot.name
        await (slot.stop() if body.now else slot.unload())
        return JsonResponse({"success": True})

    return [
        GetRoute("/v1/models", lambda: {"object": "list", "data": list(map(models.describe, models.all))}),
        BodyRoute("/models/load", LoadRequest, load_model, manages=True),
        BodyRoute("/models/unload", UnloadRequest, unload_model, manages=True),
        Route("/v1/models/{name:path}", get_model),
    ]


def application(models: Models, rules: Rules, metrics: ServerMetrics, preload: Sequence[str] = ()) -> Starlette:
    """The ASGI application. It loads the models of `preload` at its start, and others as requests name them; they are
    closed when it shuts down.
    """

    async def answer(request: Request, body: GenerationBody) -> Response:
        return await generate(request, models, body)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        work = [models.watch(), models.preload(preload), *(slot.watch() for slot in models.remotes.values())]
        tasks = [asyncio.create_task(each) for each in work]
        gc.freeze()  # what has been imported stays: no collection has to look at it
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await models.close()

    cors = Middleware(
        CORSMiddleware,
        allow_origins=sorted(rules.origins),
        allow_origin_regex=LOCAL_ORIGINS.pattern,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        allow_private_network=True,
    )
    # CORS comes before the guard: it answers preflights, and web pages can read the guard's refusals.
    middleware = [Middleware(AccessLog, count=metrics.count_request), cors, Middleware(Guard, rules=rules)]
    routes = [
        BodyRoute("/v1/chat/completions", ChatRequest, answer),
        BodyRoute("/v1/completions", CompletionRequest, answer),
        BodyRoute("/v1/responses", ResponsesRequest, answer),
        BodyRoute("/v1/messages", MessagesRequest, answer),
        embedding_route("/v1/embeddings", models, format_openai),
        *token_routes(models),
        *model_routes(models),
        *ollama_routes(models),
    ]
    return Starlette(
        routes=[
            *routes,
            GetRoute("/openapi.json", lambda: document(routes)),
            *status_routes(models, metrics),
            *page_routes(),
        ],
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={404: reject_path, 405: reject_path},
    )
