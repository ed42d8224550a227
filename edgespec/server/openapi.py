"""The OpenAPI document, generated from the models that validate the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from edgespec import __version__
from edgespec.server.http import BodyRoute

_GETS = {
    "/v1/models": "The models.",
    "/api/tags": "The models, as Ollama lists them.",
    "/api/ps": "The loaded models, as Ollama lists them.",
    "/api/version": "The version of Ollama's interface.",
    "/health": "Whether the server is up.",
    "/props": "The state of the models, and the last answers.",
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
    """The document of `routes` and of the state, in OpenAPI 3.1."""
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
        is_streamed = "stream" in route.kind.model_fields and not path.endswith("_tokens") and path != "/apply-template"
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
