"""Maps errors of the hub client, the network and the disk to edgespec's errors."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from edgespec.errors import CacheError, EdgespecError, HubError, reason_of
from edgespec.proxies import ProxyUnusable, open_client

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
FREE_SPACE = "Free some space, or set HF_HOME to a folder on a larger disk."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class HubUnreachable(HubError):
    """The hub did not answer, because of the network, the server or offline mode; a cached copy may be used instead."""


_AGAIN = "Try again: a pull resumes where it stopped."
_NO_ADDRESS = (HubError, "{endpoint!a} is not a usable hub address.", "Correct or unset HF_ENDPOINT.")
_NO_HUB = (HubError, "{endpoint} does not answer like a model hub.", "Check HF_ENDPOINT and proxy settings.")
_OFFLINE = (
    HubUnreachable,
    "{file} is not in the cache at {cache_dir}, and offline mode is on.",
    "Unset HF_HUB_OFFLINE, or name a model that `edgespec list` shows.",
)
NO_HUB, OFFLINE = "no hub", "OfflineModeIsEnabled"
"""Errors of our own for `make_error`: answers that are no hub's, and a file that is not cached in offline mode."""

# What an error means and what to do, by the name of its class, which need not be imported, or by the hub's status.
_SENTENCES: dict[str, tuple[type[HubError], str, str]] = {
    "GatedRepoError": (
        HubError,
        "{repo} is gated: its owner gives access only after you accept the terms.",
        "Accept them at {page}, then {log_in}.",
    ),
    "DisabledRepoError": (HubError, "{repo} has been disabled by the hub.", "See {page}"),
    "RepositoryNotFoundError": (
        HubError,
        "There is no repository {repo} at {endpoint}, or it is private.",
        "Check the spelling; if it is private, {log_in}.",
    ),
    "RevisionNotFoundError": (HubError, "{repo} has no revision {revision}.", "See the branches and tags at {page}"),
    "401": (HubError, "{endpoint} does not accept the access token.", "To get a valid one, {log_in}."),
    "403": (HubError, "Access to {repo} is forbidden for this token.", "Give it read access to it, or {log_in}."),
    "429": (HubUnreachable, "{endpoint} limits the rate of requests.", "Wait some minutes, or {log_in}."),
    "500": (HubUnreachable, "{endpoint} answers with server error {code}.", _AGAIN),
    "HfHubHTTPError": (HubError, "{endpoint} refused the request for {repo} (HTTP {code}).", "Check HF_ENDPOINT."),
    "HFValidationError": (HubError, "{repo!a} is not a repository name.", "Write a repository as user/name."),
    **dict.fromkeys((OFFLINE, "LocalEntryNotFoundError"), _OFFLINE),
    **dict.fromkeys((NO_HUB, "FileMetadataError", "JSONDecodeError", "UnicodeDecodeError", "RecursionError"), _NO_HUB),
    "UnsupportedProtocol": _NO_ADDRESS,
    "InvalidURL": _NO_ADDRESS,
    "LocalProtocolError": _NO_ADDRESS,
    "ProxyError": (HubUnreachable, "The proxy for {endpoint} does not work.", "Check HTTPS_PROXY."),
    "certificate": (
        HubUnreachable,
        "The certificate of {endpoint} is not trusted.",
        "Check the clock, or set SSL_CERT_FILE.",
    ),
    "TimeoutException": (HubUnreachable, "{endpoint} did not answer in time.", _AGAIN),
    "ConnectError": (
        HubUnreachable,
        "{endpoint} cannot be reached.",
        "Check the network connection and HF_ENDPOINT.",
    ),
    "HTTPError": (HubUnreachable, "The connection to {endpoint} broke.", _AGAIN),
}


@dataclass(frozen=True, slots=True)
class HubContext:
    """The request that failed; `names` are the files that the repository has."""

    endpoint: str
    cache_dir: str
    repo: str
    revision: str | None = None
    path: str | None = None
    names: tuple[str, ...] = ()


@contextmanager
def map_errors(context: HubContext) -> Iterator[None]:
    """Raise failures inside the block as edgespec's errors; unknown errors pass unchanged."""
    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:
        if isinstance(error, ImportError | ValueError):
            _check_proxy(context)
        known = translate(error, context)
        if known is None:
            raise
        raise known from error


def _check_proxy(context: HubContext) -> None:
    """Raise HubUnreachable if the client could not open its session because of the proxies in the environment."""
    import httpx

    try:
        open_client(httpx.Client, context.endpoint).close()
    except ProxyUnusable as unusable:
        raise HubUnreachable(unusable.message, hint=unusable.hint) from unusable


def translate(error: BaseException, context: HubContext) -> EdgespecError | None:
    """The edgespec error for `error`; None if it is no failure of the hub, the network or the disk."""
    names = [kind.__name__ for kind in type(error).__mro__]
    if "LocalEntryNotFoundError" in names and error.__cause__ is not None:
        return translate(error.__cause__, context)
    if "RemoteEntryNotFoundError" in names:
        return missing_file_error(context)
    name = next((each for each in names if each in _SENTENCES), None)
    if name is None:
        return _disk_error(error, context) if isinstance(error, OSError) else None
    code = getattr(getattr(error, "response", None), "status_code", 0)
    if name == "HfHubHTTPError" and (code >= 500 or str(code) in _SENTENCES):
        name = str(min(code, 500))
    elif name == "ConnectError" and "CERTIFICATE" in str(error).upper():
        name = "certificate"
    return make_error(name, context, code)


def make_error(name: str, context: HubContext, code: int = 0) -> HubError:
    """The error that has the client's class name `name`, or for the hub's status `code`."""
    kind, message, hint = _SENTENCES[name]
    file = f"{context.path} of {context.repo}" if context.path else context.repo
    facts = {**asdict(context), "code": code, "file": file}
    return kind(message.format(**facts), hint=hint.format(page=f"{context.endpoint}/{context.repo}", log_in=_LOG_IN))


def missing_file_error(context: HubContext) -> HubError:
    """The error for a file that the repository does not have; the hint names the nearest ones."""
    near = difflib.get_close_matches(context.path or "", context.names, n=3, cutoff=0.3)
    hint = f"The nearest: {', '.join(near)}." if near else f"See {context.endpoint}/{context.repo}/tree/main"
    return HubError(f"{context.repo} has no file {context.path}.", hint=hint)


def _disk_error(error: OSError, context: HubContext) -> CacheError:
    if error.errno in _FULL:
        return CacheError(f"The disk of {context.cache_dir} is full or its quota is used up.", hint=FREE_SPACE)
    return CacheError(
        f"The model cache cannot be used ({error.filename or context.cache_dir}: {reason_of(error)}).",
        hint="Check its permissions and the disk, or set HF_HOME to a folder of your own.",
    )
