"""The bodies of errors, in the format of each interface."""

from __future__ import annotations

from typing import Any

from edgespec.errors import EdgespecError, PromptTooLong, UnknownModel

_OPENAI_ERRORS = {  # status -> type, code; other statuses are a server_error
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", None),
    405: ("invalid_request_error", None),
    408: ("invalid_request_error", None),
    413: ("invalid_request_error", None),
    415: ("invalid_request_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
_ANTHROPIC_ERRORS = {  # status -> type; other statuses are an api_error
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def format_error(path: str, status: int, error: EdgespecError) -> dict[str, Any]:
    """The body of an error in the format of the interface at `path`."""
    if isinstance(error, PromptTooLong):
        return _format_overflow(path, error)
    message = f"{error.message} {error.hint}"
    if path.startswith("/api/"):
        return {"error": message}
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": _ANTHROPIC_ERRORS.get(status, "api_error"), "message": message}}
    kind, code = _OPENAI_ERRORS.get(status, ("server_error", None))
    code = "model_not_found" if isinstance(error, UnknownModel) else code
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _format_overflow(path: str, error: PromptTooLong) -> dict[str, Any]:
    """The words and codes by which clients know that they may shorten a conversation and try again."""
    if path.startswith("/v1/messages"):
        message = f"prompt is too long: {error.n_prompt} tokens > {error.n_context} maximum"
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    message = (
        f"This model's maximum context length is {error.n_context} tokens. However, your prompt has {error.n_prompt} "
        "tokens. Shorten it, or restart the server with a larger --ctx."
    )
    if path.startswith("/api/"):
        return {"error": message}
    kinds = {"type": "invalid_request_error", "param": None, "code": "context_length_exceeded"}
    return {"error": {"message": message, **kinds, "n_prompt_tokens": error.n_prompt, "n_ctx": error.n_context}}
