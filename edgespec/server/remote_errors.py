"""What clients are told when another server fails or refuses: one sentence, without its address and without a key.

A refusal may quote the request, so its text is for the caller and not for the log.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from edgespec.errors import EdgespecError, PromptTooLong
from edgespec.server.http import HttpError
from edgespec.server.policy import Busy
from edgespec.server.remote_model import RemoteModel

_NO_KEY = (401, 403)
_MAX_MESSAGE = 1000  # characters
_OVERFLOW = re.compile(r"maximum context length (?:is|of) ([\d,]+) tokens\D+([\d,]+)")  # vLLM's and OpenAI's words
CHECK_URL = "Check url in its table of the configuration; most end with /v1."
_AGAIN = "Try again later."


class RemoteFailure(HttpError):
    """The other server cannot serve any request."""

    def __init__(self, name: str, what: str, hint: str) -> None:
        super().__init__(502, f"the server behind '{name}' {what}.", hint=hint)


class Unreachable(RemoteFailure):
    """There is no connection to the other server, or none that lasted."""


class RemoteRefusal(HttpError):
    """The other server refuses a request; the message is its own."""

    def __init__(self, name: str, status: int, message: str) -> None:
        super().__init__(status, message, hint=f"(The server behind '{name}' says so.)")
        self.log_message = f"the server behind '{name}' refuses the request with status {status}."


def explain_failure(name: str, error: httpx.HTTPError | OSError) -> Unreachable:
    """The error of a connection that cannot be made, or that broke."""
    causes = list(_causes(error))
    if found := next((each for each in causes if isinstance(each, ssl.SSLCertVerificationError)), None):
        reason = found.verify_message.split(",")[0].rstrip(".").lower()  # the rest names the host
        hint = "Trust its certificate with SSL_CERT_FILE, or use its right name in url."
        return Unreachable(name, f"has a certificate that is not trusted ({reason})", hint)
    if any(isinstance(each, ssl.SSLError) for each in causes):
        return Unreachable(name, "does not speak TLS as it should", CHECK_URL)
    if isinstance(error, httpx.ConnectTimeout):
        return Unreachable(name, "cannot be reached (no answer)", f"Start it. {CHECK_URL}")
    if isinstance(error, httpx.ProxyError):
        return Unreachable(name, "cannot be reached through the proxy", "Check HTTPS_PROXY and NO_PROXY.")
    if isinstance(error, httpx.ConnectError):
        return Unreachable(name, f"cannot be reached ({_name_cause(causes)})", f"Start it. {CHECK_URL}")
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError | httpx.CloseError):
        return Unreachable(name, "ended the connection", _AGAIN)
    return Unreachable(name, "does not answer as HTTP", CHECK_URL)


def explain_status(name: str, model: RemoteModel, response: httpx.Response, body: bytes) -> EdgespecError:
    """The error of a response that is not 200. `body` is the beginning of its body."""
    status, told = response.status_code, read_error(body)
    if status in _NO_KEY:
        return _explain_key(name, model)
    if status == 508:
        return HttpError(508, f"the url of '{name}' leads back to this server.", hint="Correct it in its table.")
    if 300 <= status < 400:
        return RemoteFailure(name, "redirects to another address", "Set url to the address where it leads.")
    if told is None:
        return RemoteFailure(name, f"answers with status {status} and not as OpenAI's interface does", CHECK_URL)
    return explain_error(name, model, status, told, response.headers)


def explain_error(
    name: str, model: RemoteModel, status: int, told: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> EdgespecError:
    """The error that another server has told. `status`: that of the response, or the one that an event names."""
    if status in _NO_KEY:
        return _explain_key(name, model)
    message = _clean(str(told.get("message") or "no reason"), model)
    if (overflow := _read_overflow(told, message)) is not None:
        return overflow
    if status == 429:
        after = (headers or {}).get("retry-after", "")
        seconds = int(after) if after.isascii() and after.isdecimal() and len(after) < 7 else 1
        hint = f"Try again in {seconds} seconds."
        return Busy(f"the server behind '{name}' is busy.", hint=hint, retry_after_s=seconds)
    if 400 <= status < 500 or status == 501:  # which llama-server gives for what it was not started for
        return RemoteRefusal(name, status, f"{message}.")
    failed = HttpError(status if status in (503, 504) else 502, f"the server behind '{name}' failed: {message}.",
                       hint=_AGAIN)  # fmt: skip
    failed.log_message = f"the server behind '{name}' failed with status {status}."
    return failed


def _explain_key(name: str, model: RemoteModel) -> HttpError:
    """That the key is missing or wrong: not the caller's. The other server's text may hold a part of the right one."""
    fix = f"set {model.key_env}" if model.key_env else "set key_env in its table of the configuration"
    what = "refuses its key" if model.key_env else "asks for a key"
    return HttpError(502, f"the server behind '{name}' {what}; {fix}.", hint="Then restart the server.")


def read_error(body: bytes) -> dict[str, Any] | None:
    """The object of an error with its `message`, in any of the forms that servers have; None where there is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return find_error(value)


def find_error(value: Any) -> dict[str, Any] | None:
    """As `read_error`, in a JSON value."""
    if not isinstance(value, dict):
        return None
    error = value.get("error") or value.get("detail") or (value if isinstance(value.get("message"), str) else None)
    if isinstance(error, list) and error and isinstance(error[0], dict):  # FastAPI's
        error = {"message": error[0].get("msg")}
    if isinstance(error, str):
        error = {"message": error}
    return error if isinstance(error, dict) else None


def _read_overflow(told: Mapping[str, Any], message: str) -> PromptTooLong | None:
    """That a prompt exceeds the context, with the numbers by which clients know it."""
    n_prompt, n_context = told.get("n_prompt_tokens"), told.get("n_ctx")  # llama-server's and edgespec's
    if not (isinstance(n_prompt, int) and isinstance(n_context, int)):
        found = _OVERFLOW.search(message)
        if found is None:
            return None
        n_context, n_prompt = (int(number.replace(",", "")) for number in found.groups())
    text = f"the prompt has {n_prompt:,} tokens, the context of the other server {n_context:,}."
    return PromptTooLong(text, hint="Shorten it.", n_prompt=n_prompt, n_context=n_context)


def _clean(message: str, model: RemoteModel) -> str:
    """Another server's words on one line, without its key and its address."""
    text = " ".join(message.split())
    for secret in (model.key, urlsplit(model.url).netloc):
        text = text.replace(secret, "...") if secret else text
    return text[:_MAX_MESSAGE].rstrip(".")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what has caused it."""
    yield error
    for each in getattr(error, "exceptions", ()):
        yield from _causes(each)
    if (cause := error.__cause__ or error.__context__) is not None:
        yield from _causes(cause)


def _name_cause(causes: list[BaseException]) -> str:
    if any(isinstance(each, socket.gaierror) for each in causes):
        return "its name is not known"
    number = next((each.errno for each in causes if isinstance(each, OSError) and each.errno), None)
    return os.strerror(number).lower() if number is not None else "no connection"
