"""HTTP clients that follow the proxies of the environment, except to this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from edgespec.errors import HubError, reason_of
from edgespec.sockets import is_loopback

if TYPE_CHECKING:
    import httpx

Client = TypeVar("Client", "httpx.Client", "httpx.AsyncClient")


class ProxyUnusable(HubError):
    """The environment names a proxy of a kind that is not known, or whose address is none."""


def open_client(kind: type[Client], url: str, **settings: Any) -> Client:
    """A client of httpx for the server at `url`. Raises ProxyUnusable, but not for a server on this machine.

    A proxy on another machine would look for a loopback address there, and many refuse it.
    """
    import httpx

    if is_on_this_machine(url):
        # httpx reads the proxies of the environment only for clients that are given no transport.
        own = httpx.HTTPTransport if issubclass(kind, httpx.Client) else httpx.AsyncHTTPTransport
        limits = {"limits": settings.pop("limits")} if "limits" in settings else {}
        return kind(transport=own(**limits), **settings)
    try:
        return kind(**settings)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ProxyUnusable(
            f"the proxy of the environment cannot be used ({reason_of(error).rstrip('.')}).",
            hint="Correct or unset ALL_PROXY, HTTPS_PROXY and HTTP_PROXY.",
        ) from error


def is_on_this_machine(url: str) -> bool:
    """Tells whether the URL's host is a loopback address."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:  # of a bracket without its pair
        return False
