"""The OpenAPI document, generated from the models that validate the bodies."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from edgespec import __version__
from edgespec.server.anthropic import CountRequest, MessagesRequest
from edgespec.server.embeddings import EmbeddingRequest, OllamaEmbeddingsRequest, OllamaEmbedRequest
from edgespec.server.fields import Body, LoadRequest, UnloadRequest
from edgespec.server.ollama import DeleteRequest, OllamaChatRequest, OllamaGenerateRequest, PullRequest, ShowRequest
from edgespec.server.openai import ChatRequest, CompletionRequest
from edgespec.server.responses import ResponsesRequest
from edgespec.server.token_routes import DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/chat/completions/input_tokens": ChatRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/apply-template": ChatRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/pull": PullRequest,
    "/api/show": ShowRequest,
    "/api/delete": DeleteRequest,
    "/models/load": LoadRequest,
    "/models/unload": UnloadRequest,
}
_STREAMED = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/api/chat", "/api/generate", "/api/pull",
)  # fmt: skip
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


def document() -> dict[str, Any]:
    """The document, in OpenAPI 3.1."""
    _, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    any_object = {"application/json": {"schema": {"type": "object"}}}
    errors = {status: {"description": text, "content": any_object} for status, text in _ERRORS.items()}
    paths: dict[str, Any] = {}
    for path, body in _BODIES.items():
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        stream = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
        content = {**any_object, stream: {}} if path in _STREAMED else any_object
        operation = {
            "summary": (body.__doc__ or "").split("\n")[0],
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {"200": {"description": "The answer.", "content": content}, **errors},
        }
        paths[path] = {"delete" if path == "/api/delete" else "post": operation}
    for path, text in _GETS.items():
        answer = {"description": text, "content": any_object}
        paths[path] = {"get": {"summary": text, "responses": {"200": answer, **errors}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }
