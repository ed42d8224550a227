"""Maps errors of the hub client, the network and the disk to edgespec's errors."""

from __future__ import annotations

import difflib
import errno
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgespec.errors import CacheError, EdgespecError, HubError

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
FREE_SPACE = "Free some space, or set HF_HOME to a folder on a larger disk."

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


class HubUnreachable(HubError):
    """The hub did not answer, because of the network, the server or offline mode; a cached copy may be used instead."""


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
        known = translate(error, context)
        if known is None:
            raise
        raise known from error


def translate(error: BaseException, context: HubContext) -> EdgespecError | None:
    """The edgespec error for `error`; None if it is no failure of the hub, the network or the disk."""
    import httpx
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return translate(error.__cause__, context)
    if isinstance(error, errors.HfHubHTTPError):
        return _map_response(error, context)
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return offline_error(context)
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{context.repo!a} is not a repository name.", hint="Write a repository as user/name.")
    if isinstance(error, errors.FileMetadataError | json.JSONDecodeError):
        return not_a_hub_error(context)
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL | httpx.LocalProtocolError):
        return HubError(f"{context.endpoint!a} is not a usable hub address.", hint="Correct or unset HF_ENDPOINT.")
    if isinstance(error, httpx.HTTPError):
        return _map_network(error, context)
    if isinstance(error, OSError):
        return _map_disk(error, context)
    return None


def offline_error(context: HubContext) -> HubUnreachable:
    """The error for a file or model that is not cached in offline mode."""
    name = f"{context.path} of {context.repo}" if context.path else context.repo
    return HubUnreachable(
        f"{name} is not in the cache at {context.cache_dir}, and offline mode is on.",
        hint="Unset HF_HUB_OFFLINE, or name a model that `edgespec list` shows.",
    )


def not_a_hub_error(context: HubContext) -> HubError:
    """The error for responses that are not a hub's, such as a proxy's page."""
    return HubError(
        f"{context.endpoint} does not answer like a model hub.", hint="Check HF_ENDPOINT and proxy settings."
    )


def missing_file_error(context: HubContext) -> HubError:
    """The error for a file that the repository does not have; the hint names the nearest ones."""
    near = difflib.get_close_matches(context.path or "", context.names, n=3, cutoff=0.3)
    hint = f"The nearest: {', '.join(near)}." if near else f"See {context.endpoint}/{context.repo}/tree/main"
    return HubError(f"{context.repo} has no file {context.path}.", hint=hint)


def _map_response(error: Exception, context: HubContext) -> EdgespecError:
    from huggingface_hub import errors

    assert isinstance(error, errors.HfHubHTTPError)
    page = f"{context.endpoint}/{context.repo}"
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"{context.repo} is gated: its owner gives access only after you accept the terms.",
            hint=f"Accept them at {page}, then {LOG_IN}.",
        )
    if isinstance(error, errors.DisabledRepoError):
        return HubError(f"{context.repo} has been disabled by the hub.", hint=f"See {page}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"There is no repository {context.repo} at {context.endpoint}, or it is private.",
            hint=f"Check the spelling; if it is private, {LOG_IN}.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(
            f"{context.repo} has no revision {context.revision}.", hint=f"See the branches and tags at {page}"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return missing_file_error(context)
    return _map_status(error.response.status_code, context)


def _map_status(code: int, context: HubContext) -> EdgespecError:
    if code == 401:
        return HubError(f"{context.endpoint} does not accept the access token.", hint=f"To get a valid one, {LOG_IN}.")
    if code == 403:
        return HubError(
            f"Access to {context.repo} is forbidden for this token.",
            hint=f"Give the token read access to it, or {LOG_IN}.",
        )
    if code == 429:
        return HubUnreachable(
            f"{context.endpoint} limits the rate of requests.", hint=f"Wait some minutes, or {LOG_IN}."
        )
    if code >= 500:
        return HubUnreachable(
            f"{context.endpoint} answers with server error {code}.",
            hint="Try again later. A pull resumes where it stopped.",
        )
    return HubError(
        f"{context.endpoint} refused the request for {context.repo} (HTTP {code}).", hint="Check HF_ENDPOINT."
    )


def _map_network(error: Exception, context: HubContext) -> HubUnreachable:
    import httpx

    again = "Try again: a pull resumes where it stopped."
    if isinstance(error, httpx.ProxyError):
        return HubUnreachable(f"The proxy for {context.endpoint} does not work.", hint="Check HTTPS_PROXY.")
    if any(isinstance(cause, socket.gaierror) for cause in _iterate_causes(error)):
        return HubUnreachable(
            f"The name of {context.endpoint} cannot be resolved.", hint="Check the network connection and HF_ENDPOINT."
        )
    if "CERTIFICATE" in str(error).upper():
        return HubUnreachable(
            f"The certificate of {context.endpoint} is not trusted.", hint="Check the clock, or set SSL_CERT_FILE."
        )
    if isinstance(error, httpx.TimeoutException):
        return HubUnreachable(f"{context.endpoint} did not answer in time.", hint=again)
    if isinstance(error, httpx.ConnectError):
        return HubUnreachable(
            f"{context.endpoint} cannot be reached.", hint="Check the network connection and HF_ENDPOINT."
        )
    return HubUnreachable(f"The connection to {context.endpoint} broke.", hint=again)


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _map_disk(error: OSError, context: HubContext) -> CacheError:
    if error.errno in _FULL:
        return CacheError(f"The disk of {context.cache_dir} is full or its quota is used up.", hint=FREE_SPACE)
    if error.errno in _UNWRITABLE:
        place = error.filename or context.cache_dir
        return CacheError(
            f"The model cache cannot be written ({place}: {error.strerror}).",
            hint="Correct its permissions, or set HF_HOME to a folder of your own.",
        )
    return CacheError(
        f"The model cache at {context.cache_dir} failed: {error.strerror or error}.",
        hint="Check the disk, or set HF_HOME to another folder.",
    )
