"""RemoteModel: a model of another server with OpenAI's interface, and how its table in a configuration is checked."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from edgespec.errors import InvalidRequest
from edgespec.sockets import is_loopback

MAX_CONCURRENCY = 64
"""Requests at once, unless a table says otherwise."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_KEY = re.compile(r"[ -~]+")
_URL_HINT = 'Write the address that OpenAI\'s clients take, such as url = "https://host:8000/v1".'


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model of another server.

    url              of OpenAI's interface there, without a slash at the end
    model            its name there
    key_env          the environment variable with the key of that server; None where it needs none
    max_concurrency  requests that are sent at once
    remembers        whether the memory of another edgespec may keep the texts of this server's own user

    Raises InvalidRequest for values that cannot be used.
    """

    url: str
    model: str
    key_env: str | None = None
    max_concurrency: int = MAX_CONCURRENCY
    remembers: bool = True
    key: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _check_url(self.url))
        if not self.model:
            raise InvalidRequest("model is empty.", hint="Write the name that the other server uses.")
        if self.key_env is not None:
            object.__setattr__(self, "key", _read_key(self.key_env))

    @property
    def sends_plain_key(self) -> bool:
        """Whether the key crosses a network as plain text."""
        parts = urlsplit(self.url)
        return self.key is not None and parts.scheme == "http" and not is_loopback(parts.hostname or "")


def _check_url(url: str) -> str:
    """The URL; one without a path gets OpenAI's, /v1. Raises InvalidRequest."""
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_sound = is_sound and bool(httpx.URL(url).host)  # what cannot be asked, such as a name that is no text
    except (ValueError, httpx.InvalidURL):
        is_sound = False
    if not is_sound or any(each.isspace() for each in url):
        raise InvalidRequest("url is not an http or https address.", hint=_URL_HINT)
    if "@" in parts.netloc:
        raise InvalidRequest("url holds a name or a password.", hint="Put the key into a variable and set key_env.")
    if parts.query or parts.fragment:
        raise InvalidRequest("url has more than a path.", hint=_URL_HINT)
    path = parts.path.rstrip("/") or "/v1"
    if path.endswith(("/completions", "/models", "/embeddings", "/responses", "/messages")):
        raise InvalidRequest("url names one path of the interface.", hint=_URL_HINT)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _read_key(variable: str) -> str:
    """Raises InvalidRequest, which does not repeat what may be a key."""
    if not _VARIABLE.fullmatch(variable):
        raise InvalidRequest(
            "key_env is not the name of an environment variable.",
            hint='Put the key into a variable such as BIG_KEY, and write key_env = "BIG_KEY".',
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InvalidRequest(f"the environment variable {variable} is not set.", hint=f"Set it: export {variable}=...")
    if not _KEY.fullmatch(key):
        raise InvalidRequest(f"{variable} holds characters that no key has.", hint="Set it to the key alone.")
    return key
